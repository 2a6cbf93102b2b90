"""``python -m stagelink`` is the command ``stagelink``."""

from __future__ import annotations

from stagelink.cli import main

if __name__ == "__main__":
    main()
