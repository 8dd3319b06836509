"""A run to be killed: `python -m tests.training.ticking DIRECTORY` counts on from the last save, and prints when it is
done.

Its own measurements of every step go to `truth.jsonl`. The wall clock goes backwards all the time.
"""

import json
import os
import sys
import time
from pathlib import Path

time.time = lambda: 1e9 - 100 * time.monotonic()

from maxlib.observability import GoodputRecorder  # noqa: E402

STEPS, EVERY = 60, 10


def main(directory: Path) -> None:
    clock = GoodputRecorder(directory, every=0.1)
    truth = os.open(directory / "truth.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    saved = directory / "saved"
    with clock.span("restore"):
        time.sleep(0.05)
        begin = int(saved.read_text()) if saved.exists() else 0
    for step in range(begin + 1, STEPS + 1):
        with clock.step(step):
            with clock.span("data"):
                time.sleep(0.005)
            at = time.monotonic()
            time.sleep(0.03)
            os.write(truth, (json.dumps([step, time.monotonic() - at]) + "\n").encode())
            if step % EVERY == 0:
                with clock.span("save"):
                    time.sleep(0.02)
                    saved.with_suffix(".new").write_text(str(step))
                    os.replace(saved.with_suffix(".new"), saved)
    clock.close()
    print(time.monotonic(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
