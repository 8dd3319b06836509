"""Which full tests a change affects."""

import ast

from tests import durations
from tests.changed import ROOT, closure, directly, fitting, in_turn, report, touched, with_full_tests

MODELS, NN = ROOT / "maxlib" / "models", ROOT / "maxlib" / "nn"


def family(name):
    return ROOT / "tests" / "models" / f"test_{name}.py"


def test_a_family_is_touched_by_what_it_is_made_of():
    deepseek, mistral = closure(family("deepseek")), closure(family("mistral"))
    assert {MODELS / "deepseek.py", NN / "_mla.py", ROOT / "tests" / "models" / "golden" / "deepseek.npz"} <= deepseek
    assert NN / "_attention.py" in mistral
    assert not mistral & {MODELS / "deepseek.py", MODELS / "gemma.py"}


def test_a_change_to_one_family_touches_its_tests_and_to_attention_all():
    tests = with_full_tests()
    families = [test for test in tests if test.parent.name == "models"]
    assert {test.name for test in families} >= {"test_gemma3.py", "test_gemma3_images.py", "test_llama.py"}
    assert {*touched(families, {MODELS / "qwen3_moe.py"})} == {family("qwen3_moe")}
    assert touched(families, {NN / "_attention.py"}) == families
    assert touched(tests, {ROOT / "CHANGELOG.md"}) == []


def test_what_is_touched_comes_first_and_every_test_has_its_turn():
    files = [family("llama"), family("mistral"), family("gemma")]
    functions = [f"{file.relative_to(ROOT)}::test_{i}" for file in files for i in range(2)]
    llama, mistral, gemma = (functions[i : i + 2] for i in (0, 2, 4))
    groups = [files[1:2], files[:2], files]
    assert in_turn(functions, groups, 0) == mistral + llama + gemma
    assert [in_turn(functions, groups, commit)[0] for commit in range(4)] == mistral * 2
    assert {in_turn(functions, [files], commit)[0] for commit in range(6)} == {*functions}
    assert directly(files, {MODELS / "mistral.py"}) == [family("mistral")]


def test_as_many_are_taken_as_there_is_time_for(tmp_path):
    seconds = {"a": 5.0, "b": 9.0, "c": 4.0, "d": 2.0}
    assert fitting("abcd", seconds, 10.0) == ["a", "c"]
    said = report(["a", "b"], ["a", "c"], seconds)
    assert (
        "touched: 2 functions" in said
        and "for want of time: 1 functions" in said
        and said.endswith("b: 1 functions, 0 CPU min")
    )


def test_times_come_from_reports_of_pytest(tmp_path):
    case = '<testcase classname="tests.models.test_a.TestA" name="test_x[{}]" time="{}">{}</testcase>'
    cases = [case.format("a::b[0]", 1.5, ""), case.format("c", 2, ""), case.format("d", 9, "<skipped/>")]
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert durations.measured(tmp_path / "report.xml") == {"tests/models/test_a.py::TestA::test_x": 3.5}
    assert durations.estimated({"none": 3}) == {"none": 3 * durations.UNKNOWN}


def test_the_smoke_session_names_tests_that_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    assigned = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SMOKE")
    shared = (ROOT / "tests" / "models" / "conformance.py").read_text()
    for name in ast.literal_eval(assigned.value):
        file, *within = name.split("::")
        source = (ROOT / file).read_text()
        for word in within:
            function = word.partition("[")[0]
            assert f"def {function}(" in source + shared or f"class {function}(" in source, name
