"""Releases: the workflow, the notes, and the project's metadata files."""

import json
import re
from pathlib import Path

import pytest

import maxlib
from docs import versions
from tests.release import notes

ROOT = Path(__file__).parents[1]
CHANGES = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2030-01-02\n\n### Added\n\n- A thing.\n\n## [0.1.0]\n\n- Old.\n"
)


def files(version: str, cited: str, changes: str = CHANGES) -> tuple[str, str, str]:
    return f'x = 1\n__version__ = "{version}"\n', changes, f"title: a\nversion: {cited}\n"


def test_notes_are_the_section_of_the_version():
    assert notes("v0.2.0", *files("0.2.0", "0.2.0")) == "### Added\n\n- A thing.\n"
    assert notes("v0.1.0", *files("0.1.0", "0.1.0")) == "- Old.\n"


@pytest.mark.parametrize(
    ("tag", "version", "cited", "what"),
    [
        ("v0.2.1", "0.2.0", "0.2.0", r"the tag is v0\.2\.1"),
        ("v0.2.0", "0.2.0.dev0", "0.2.0", "dev0"),
        ("v0.2.0", "0.2.0", "0.1.0", "CITATION"),
        ("v0.3.0", "0.3.0", "0.3.0", "no section"),
    ],
)
def test_what_disagrees_is_not_released(tag, version, cited, what):
    with pytest.raises(ValueError, match=what):
        notes(tag, *files(version, cited))


def test_the_files_of_this_version_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {maxlib.__version__}\n" in citation
    texts = ((ROOT / name).read_text() for name in ("maxlib/__init__.py", "CHANGELOG.md"))
    if "dev" in maxlib.__version__:
        with pytest.raises(ValueError, match="no section"):  # a development version has none: all else was right
            notes(f"v{maxlib.__version__}", *texts, citation)
    else:
        assert "Models and weights" in notes(f"v{maxlib.__version__}", *texts, citation)


def test_workflow_and_templates_are_sound():
    yaml = pytest.importorskip("yaml")
    workflows = {path: yaml.safe_load(path.read_text()) for path in (ROOT / ".github").rglob("*.yml")}
    jobs = workflows[ROOT / ".github" / "workflows" / "release.yml"]["jobs"]
    assert set(jobs["publish"]["needs"]) == {"tests", "install"} and jobs["publish"]["if"].startswith("startsWith")
    assert jobs["install"]["strategy"]["matrix"]["python"] == supported()
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    named = [
        ROOT / word
        for line in commands
        for word in line.split()
        if word.startswith((".ci/", "tests/", "docs/versions"))
    ]
    assert named and all(path.exists() for path in named)
    body = workflows[ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"]["body"]
    (doctor,) = (field for field in body if field.get("id") == "doctor")
    assert "maxlib doctor" in doctor["attributes"]["label"] and doctor["validations"]["required"]


def supported() -> list[str]:
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def test_versions_of_the_documentation_lie_beside_each_other(tmp_path):
    site, published = tmp_path / "site", tmp_path / "published"
    (site / ".doctrees").mkdir(parents=True)
    for version in ("0.9.0", "dev", "0.10.0rc1", "0.10.0"):
        (site / "index.html").write_text(version)
        versions.add(site, published, version, "/maxlib/")
    assert (published / "0.9.0" / "index.html").read_text() == "0.9.0"
    assert not (published / "dev" / ".doctrees").exists()
    menu = json.loads((published / "switcher.json").read_text())
    assert [entry["version"] for entry in menu] == ["dev", "0.10.0", "0.10.0rc1", "0.9.0"]
    assert [entry["version"] for entry in menu if entry["preferred"]] == ["0.10.0"]
    assert menu[1]["name"] == "0.10.0 (stable)" and menu[1]["url"] == "/maxlib/0.10.0/"
    assert 'url=0.10.0/"' in (published / "index.html").read_text()
    with pytest.raises(ValueError, match="neither"):
        versions.add(site, published, "../elsewhere", "/maxlib/")
