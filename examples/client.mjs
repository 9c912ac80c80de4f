#!/usr/bin/env node
// A Reflex client for Node, without packages:
//
//   client.mjs PROMPT --socket PATH            asks an engine that runs (reflex uds MODEL PATH)
//   client.mjs PROMPT -- reflex stdio MODEL    runs one itself
//
// Prints the answer as it comes.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { createConnection } from "node:net";
import { createInterface } from "node:readline";

function open(args) {
  if (args[0] === "--socket" && args.length === 2) {
    const connection = createConnection(args[1]);
    return { reads: connection, writes: connection, close: () => connection.destroy() };
  }
  if (args[0] === "--" && args.length > 1) {
    const engine = spawn(args[1], args.slice(2), { stdio: ["pipe", "pipe", "inherit"] });
    return { reads: engine.stdout, writes: engine.stdin, close: () => engine.stdin.end() };
  }
  console.error("usage: client.mjs PROMPT (--socket PATH | -- reflex stdio MODEL)");
  process.exit(2);
}

// The events of a conversation, one object a line.
async function* events(stream) {
  for await (const line of createInterface({ input: stream, crlfDelay: Infinity })) yield JSON.parse(line);
}

const [prompt, ...args] = process.argv.slice(2);
const { reads, writes, close } = open(args);
let last = null;
for await (const event of events(reads)) {
  if (event.event === "ready") {
    writes.write(JSON.stringify({ id: 1, op: "generate", prompt, max_tokens: 64 }) + "\n");
  } else if (event.event === "token") {
    // Wait when the reader of stdout is slow: the engine then waits too, and nothing piles up here.
    if (!process.stdout.write(event.text)) await once(process.stdout, "drain");
  } else if (event.event === "done" || event.event === "error") {
    last = event;
    break;
  }
}
close();
if (last?.event === "done") {
  console.error(`\n[${last.usage.completion_tokens} tokens, ${last.finish_reason}]`);
} else {
  console.error(last ? `engine: ${last.code}: ${last.message}` : "engine: it ended");
  process.exitCode = 1;
}
