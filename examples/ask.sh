#!/usr/bin/env bash
# Ask a running engine (reflex uds MODEL SOCKET) with socat and jq:
#
#   ask.sh SOCKET PROMPT [MAX_TOKENS]
#
# The answer goes to stdout as it comes. Exit code: 0 done, 1 the engine refused, 2 usage, 3 it ended too early.
set -euo pipefail
if (($# < 2 || $# > 3)); then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
request=$(jq -cn --arg prompt "$2" --argjson most "${3:-64}" '{id: 1, op: "generate", prompt: $prompt, max_tokens: $most}')
# socat shuts its sending side when the request is out (-t: how long it then waits for the rest); the engine takes that
# as the end of input and answers all the same.
printf '%s\n' "$request" | socat -t 3600 - "UNIX-CONNECT:$1" | jq --unbuffered -nj '
  label $finish | foreach (inputs, null) as $event (null; $event;
    if . == null then "the engine ended before the answer was complete\n" | halt_error(3)
    elif .event == "token" then .text
    elif .event == "error" then "\(.code): \(.message)\n" | halt_error(1)
    elif .event == "done" then "\n", break $finish
    else empty end)'
