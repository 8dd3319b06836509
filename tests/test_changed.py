"""Which full tests a change touches."""

from tests.changed import PARTS, ROOT, closure, touched, with_full_tests

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
    assert {*touched(families, {MODELS / "mistral.py"})} == {family("mistral")}
    assert touched(families, {NN / "_attention.py"}) == families
    assert touched(tests, {ROOT / "CHANGELOG.md"}) == []


def test_every_full_test_has_its_turn():
    tests = with_full_tests()
    assert sorted(test for part in range(PARTS) for test in tests[part::PARTS]) == tests
