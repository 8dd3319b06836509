"""How long full tests take: `python -m tests.durations REPORT ...` takes the times of each function from reports that
`pytest -m "full or slow" --junitxml REPORT` wrote, and puts them into `tests/durations.json`.
"""

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
UNKNOWN = 5.0  # seconds of a test that was never measured


def stored() -> dict[str, float]:
    """Seconds of all tests of a function, by its name such as `tests/data/test_loader.py::test_x`."""
    return json.loads(FILE.read_text())


def estimated(cases: Mapping[str, int]) -> dict[str, float]:
    """Returns the seconds per test function, each with its number of tests."""
    known = stored()
    return {function: known.get(function, UNKNOWN * count) for function, count in cases.items()}


def measured(report: Path) -> dict[str, float]:
    """Seconds by function, of those that ran."""
    found: dict[str, float] = {}
    for case in ET.parse(report).iter("testcase"):
        if "classname" in case.attrib and all(case.find(end) is None for end in ("skipped", "failure", "error")):
            name = function(case.attrib["classname"], case.attrib["name"])
            found[name] = found.get(name, 0.0) + float(case.attrib["time"])
    return found


def function(classname: str, name: str) -> str:
    """A function's name from a report's: `tests.models.test_a.TestA` and `test_x[y]` name a class's."""
    words = classname.split(".")
    size = next(i for i, word in enumerate(words, start=1) if word.startswith("test_"))
    return "::".join(["/".join(words[:size]) + ".py", *words[size:], name.partition("[")[0]])


def main(*reports: str) -> None:
    found = stored()
    for report in reports:
        found |= {name: round(seconds, 1) for name, seconds in measured(Path(report)).items()}
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
