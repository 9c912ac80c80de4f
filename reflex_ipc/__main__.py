"""Entry of the command, as `python -m reflex_ipc` and as a file run by the installed launcher under `-I -S`."""

import sys

if __name__ == "__main__":
    if __package__ == "":
        # Run as a file: isolated and without `site`, the path lacks the folder this package lies in.
        sys.path.insert(0, __file__.rpartition("/")[0].rpartition("/")[0])
    from reflex_ipc.cli import main

    sys.exit(main(sys.argv[1:]))
