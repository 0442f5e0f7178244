from __future__ import annotations

import copy
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from jaxlightning.profilers import (
    AdvancedProfiler,
    JaxProfiler,
    PassThroughProfiler,
    Profiler,
    SimpleProfiler,
)
from jaxlightning.profilers._select import select_profiler
from jaxlightning.utilities.exceptions import MisconfigurationException


def test_the_simple_profiler_records_every_call() -> None:
    profiler = SimpleProfiler()
    for _ in range(3):
        with profiler.profile("a"):
            time.sleep(0.01)
    with profiler.profile("outer"), profiler.profile("inner"):
        pass
    assert {name: len(times) for name, times in profiler.recorded_durations.items()} == {"a": 3, "outer": 1, "inner": 1}
    assert all(0.01 <= seconds < 1 for seconds in profiler.recorded_durations["a"])


def test_the_simple_profiler_refuses_what_is_out_of_order() -> None:
    profiler = SimpleProfiler()
    profiler.start("a")
    with pytest.raises(ValueError, match="Attempted to start a which has already started"):
        profiler.start("a")
    profiler.stop("a")
    with pytest.raises(ValueError, match=r"\(b\) which was never started"):
        profiler.stop("b")


def test_an_action_ends_when_it_raises() -> None:
    profiler = SimpleProfiler()
    with pytest.raises(KeyError), profiler.profile("a"):
        raise KeyError
    assert len(profiler.recorded_durations["a"]) == 1


@pytest.mark.parametrize("extended", [True, False])
def test_the_simple_report_puts_the_longest_first(extended: bool, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = SimpleProfiler(extended=extended)
    assert "Profiler Report" in profiler.summary()
    profiler.recorded_durations["short"] = [0.1, 0.1]
    profiler.recorded_durations["long"] = [3.0]
    profiler.setup("fit")
    profiler.describe()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FIT Profiler Report"
    cells = [[cell.strip() for cell in line.split("|") if cell.strip()] for line in lines if line.startswith("|")]
    if extended:
        assert cells[0] == ["Action", "Mean duration (s)", "Num calls", "Total time (s)", "Percentage %"]
        assert cells[1][:3] == ["Total", "-", "3"]
        assert [cell[:4] for cell in cells[2:]] == [["long", "3.0", "1", "3.0"], ["short", "0.1", "2", "0.2"]]
    else:
        assert cells == [
            ["Action", "Mean duration (s)", "Total time (s)"],
            ["long", "3.0", "3.0"],
            ["short", "0.1", "0.2"],
        ]


@pytest.mark.parametrize(
    ("given", "log_dir", "local_rank", "expected"),
    [
        ({"filename": "p", "dirpath": "here"}, None, None, "here/fit-p.txt"),
        ({"filename": "p"}, "logs", None, "logs/fit-p.txt"),
        ({"filename": "p", "dirpath": "here"}, "logs", 1, "here/fit-p-1.txt"),
    ],
)
def test_a_report_with_a_file_name_goes_there(
    given: dict[str, Any],
    log_dir: str | None,
    local_rank: int | None,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = SimpleProfiler(**given)
    profiler.setup("fit", local_rank, log_dir)
    with profiler.profile("an action"):
        pass
    profiler.describe()
    assert "an action" in Path(expected).read_text()
    assert capsys.readouterr().out == ""
    profiler.describe()
    assert Path(expected).read_text().count("FIT Profiler Report") == 2


def test_only_the_first_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for profiler in (SimpleProfiler(), AdvancedProfiler(), JaxProfiler()):
        profiler.setup("fit", local_rank=1)
        profiler.describe()
    assert capsys.readouterr().out == ""


@pytest.mark.lightning
@pytest.mark.parametrize("action", [None, "a/b:c", "[Callback]Early{'monitor': 'x'}.on_fit_start"])
@pytest.mark.parametrize(("stage", "filename", "rank"), [(None, None, None), ("fit", "p", None), ("test", "a/b", 3)])
def test_file_names_are_lightnings(stage: Any, filename: Any, rank: Any, action: Any) -> None:
    from lightning.pytorch.profilers import SimpleProfiler as Theirs

    names = []
    for profiler in (SimpleProfiler(filename=filename), Theirs(filename=filename)):
        profiler.setup(stage, rank, None)
        names.append(profiler._prepare_filename(action_name=action, extension=".prof"))
    assert names[0] == names[1]


def _work() -> int:
    return sum(range(1000))


def test_the_advanced_profiler_shows_functions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profiler = AdvancedProfiler(dirpath=tmp_path, dump_stats=True)
    profiler.setup("fit")
    with profiler.profile("outer"):
        with profiler.profile("in/ner"):
            _work()
        _work()
    profiler.describe()
    out = capsys.readouterr().out
    assert "Profile stats for: outer" in out
    assert "Profile stats for: in/ner" in out
    assert out.count("(_work)") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-in_ner.prof", "fit-outer.prof"]
    assert profiler.profiled_actions == {}


def test_the_advanced_profiler_refuses_what_was_never_started() -> None:
    with pytest.raises(ValueError, match=r"\(b\) which was never started"):
        AdvancedProfiler().stop("b")
    profiler = AdvancedProfiler(dump_stats=True)
    with profiler.profile("a"):
        pass
    with pytest.raises(ValueError, match="needs a `dirpath`"):
        profiler.describe()


def test_profilers_can_be_copied_and_pickled() -> None:
    for profiler in (SimpleProfiler("d", "f"), AdvancedProfiler("d", "f", 0.5), JaxProfiler("d", num_steps=2)):
        with profiler.profile("a"):
            pass
        for other in (copy.deepcopy(profiler), pickle.loads(pickle.dumps(profiler))):
            assert other.dirpath == "d"


@pytest.mark.slow
def test_the_jax_profiler_writes_a_trace_of_the_steps_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: x @ x)
    profiler = JaxProfiler(skip_steps=2, num_steps=2)
    profiler.setup("fit", log_dir=tmp_path)
    traced = []
    with profiler.profile("run_training_epoch"):
        for _ in range(6):
            with profiler.profile("run_training_batch"):
                step(jnp.ones((8, 8)))
                traced.append(profiler._is_tracing)
    assert traced == [False, False, True, True, False, False]
    profiler.describe()
    assert capsys.readouterr().out.strip().endswith(f"trace of up to 2 steps in {tmp_path}/")
    names = {path.name for path in tmp_path.glob("plugins/profile/*/*")}
    assert "perfetto_trace.json.gz" in names  # for https://ui.perfetto.dev
    assert any(name.endswith(".xplane.pb") for name in names)  # for TensorBoard


@pytest.mark.slow
def test_a_run_that_ends_inside_the_trace_still_writes_it(tmp_path: Path) -> None:
    profiler = JaxProfiler(dirpath=tmp_path, skip_steps=0, num_steps=100)
    profiler.setup("test")
    profiler.start("[Strategy]SingleDeviceStrategy.test_step")
    profiler.teardown("test")
    assert list(tmp_path.glob("plugins/profile/*/*"))


def test_a_run_too_short_for_a_trace_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = JaxProfiler(skip_steps=5)
    profiler.setup("fit")
    with profiler.profile("run_training_batch"):
        pass
    profiler.describe()
    assert "no trace was written, the run had 1 steps and the trace begins after 5" in capsys.readouterr().out


def test_impossible_numbers_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="skip_steps=-1, num_steps=10"):
        JaxProfiler(skip_steps=-1)
    with pytest.raises(ValueError, match="num_steps=0"):
        JaxProfiler(num_steps=0)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, PassThroughProfiler),
        ("simple", SimpleProfiler),
        ("Advanced", AdvancedProfiler),
        ("jax", JaxProfiler),
        ("pytorch", JaxProfiler),
        ("xla", JaxProfiler),
    ],
)
def test_a_name_selects_a_profiler(given: Any, kind: type[Profiler]) -> None:
    assert type(select_profiler(given)) is kind


def test_another_name_or_object_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"it can only be one of .*'simple'.*Received: 'fast'"):
        select_profiler("fast")
    with pytest.raises(TypeError, match="got int: 3"):
        select_profiler(3)
    profiler = SimpleProfiler()
    assert select_profiler(profiler) is profiler


@pytest.mark.slow
def test_the_trace_of_a_run_can_be_read_for_tensorboard_and_for_perfetto(tmp_path: Path) -> None:
    import gzip
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxlightning

    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: p * 0.9, params), (batch @ params["w"]).mean()

    jaxlightning.fit(
        {"w": jnp.ones(3)}, [np.ones((4, 3), np.float32)] * 30, train_step=step, num_epochs=1, profiler="jax",
        default_root_dir=tmp_path, log_every_n_steps=10, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (trace,) = tmp_path.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert sum("dur" in event for event in events) > 10
    (planes,) = tmp_path.rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(planes))
    assert any("CPU" in plane.name and list(plane.lines) for plane in data.planes)
