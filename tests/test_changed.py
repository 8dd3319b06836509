"""Which full tests a change affects."""

from tests.changed import ROOT, closure, directly, fitting, in_turn, touched, with_full_tests

MODELS, NN = ROOT / "maxlib" / "models", ROOT / "maxlib" / "nn"


def family(name):
    return ROOT / "tests" / "models" / f"test_{name}.py"


def test_a_family_is_touched_by_what_it_is_made_of():
    deepseek, mistral = closure(family("deepseek")), closure(family("mistral"))
    assert {
        MODELS / "deepseek.py",
        NN / "attention" / "_latent.py",
        ROOT / "tests" / "models" / "golden" / "deepseek.npz",
    } <= deepseek
    assert NN / "attention" / "_grouped_query.py" in mistral
    assert not mistral & {MODELS / "deepseek.py", MODELS / "gemma.py"}


def test_a_change_to_one_family_touches_its_tests_and_to_attention_all():
    families = [family(name) for name in ("gemma3_images", "llama", "mixtral")]
    assert {*families} <= {*with_full_tests()}
    assert touched(families, {MODELS / "mixtral.py"}) == [family("mixtral")]
    assert touched(families, {NN / "attention" / "_grouped_query.py"}) == families
    assert touched(families, {ROOT / "CHANGELOG.md"}) == []


def test_a_row_of_the_table_of_families_is_touched_as_a_file_is():
    rows = [test for test in with_full_tests() if test.name.startswith("test_families.py")]
    granite = ROOT / "tests/models/test_families.py::TestGranite"
    assert directly(rows, {MODELS / "granite.py"}) == touched(rows, {MODELS / "granite.py"}) == [granite]
    assert touched(rows, {ROOT / "tests/models/conformance.py"}) == rows
    functions = [f"{test.relative_to(ROOT)}::test_it" for test in rows]
    assert in_turn(functions, [[granite]], 0) == ["tests/models/test_families.py::TestGranite::test_it"]


def test_what_is_touched_comes_first_and_every_test_has_its_turn():
    files = [family("llama"), family("mistral"), family("gemma")]
    functions = [f"{file.relative_to(ROOT)}::test_{i}" for file in files for i in range(2)]
    llama, mistral, gemma = (functions[i : i + 2] for i in (0, 2, 4))
    groups = [files[1:2], files[:2], files]
    assert in_turn(functions, groups, 0) == mistral + llama + gemma
    assert [in_turn(functions, groups, commit)[0] for commit in range(4)] == mistral * 2
    assert {in_turn(functions, [files], commit)[0] for commit in range(6)} == {*functions}
    assert directly(files, {MODELS / "mistral.py"}) == [family("mistral")]


def test_as_many_are_taken_as_were_asked_for():
    assert fitting("abcd", {"a": 5, "b": 9, "c": 4, "d": 2}, 10) == ["a", "c"]
