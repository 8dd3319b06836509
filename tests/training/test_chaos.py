"""One fault of `tests.training.chaos`; `nox -s chaos` injects all of them."""

import pytest

from tests.training import chaos


# By default tests/checkpoint has kills (test_kill.py), and full disks and flipped bits (test_damage.py).
@pytest.mark.full
@pytest.mark.parametrize("faults", [["flipped"], ["full_disk", "clock", "flipped"]], ids=["one", "three"])
def test_faults_of_one_process(tmp_path, monkeypatch, faults):
    """A kill and a flipped bit in the newest step; a disk that is full for a while, a clock that jumps."""
    monkeypatch.setattr(chaos, "BRIEF", 1.0)
    result = chaos.chaos(tmp_path, faults, processes=1, period=0.0, pause=0.02)
    assert [fault.restarted for fault in result.faults] == [name in chaos.FATAL for name in faults]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_each_fault_of_two_processes(tmp_path):
    result = chaos.chaos(tmp_path, list(chaos.FAULTS), processes=2, period=1.0)
    assert {fault.name for fault in result.faults if fault.restarted} >= chaos.FATAL


def test_a_run_that_lost_a_step_is_noticed(tmp_path):
    for name, steps in (("ours", (1, 2)), ("untouched", (1, 3))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "final-0.json").write_text(str(list(steps)))
    with pytest.raises(AssertionError, match="came to another end"):
        chaos.compare(tmp_path / "ours", tmp_path / "untouched", 1, 2)
