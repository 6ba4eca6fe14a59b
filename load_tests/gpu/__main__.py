"""Tests on a GPU: the engine alone, or the whole server through Ray.

    python -m load_tests.gpu engine --json engine.json
    python -m load_tests.gpu serve --json serve.json --minutes 4
    python -m load_tests.gpu serve --json serve.json --resume

`engine` needs torch, triton, transformers and numpy; `serve` needs the packages of `serve-app
serve`. `--resume` continues the stages of an earlier report. Each stage is a separate process with
its own verdict. The report is written after each check, with a Markdown table. `--device cpu` runs
the whole sequence on tiny shapes, to test that it runs. The exit status is 0 if every selected
stage passed.
"""

import argparse
import signal
import sys
from pathlib import Path

from load_tests.gpu.runner import Report, run_suite
from load_tests.gpu.suites import SUITES


def main() -> int:
    """Run the stages; print and write their results."""
    # Ends the stage that runs, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments = _arguments()
    report = Report.opened(arguments.json, resume=arguments.resume)
    only = [word for word in arguments.only.split(",") if word]
    try:
        passed = run_suite(SUITES[arguments.suite], arguments.device, only, arguments.minutes, report)
    except ValueError as error:
        raise SystemExit(f"--only: {error}") from error
    print(report.table(), end="")
    return int(not passed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="words, separated by commas: run stages whose name contains one")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--resume", action="store_true", help="leave out the stages that the report has verdicts for")
    parser.add_argument("--minutes", type=float, default=1440.0, help="begin no stage after that; the last ends then")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
