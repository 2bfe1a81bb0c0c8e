"""What a training loop in Python reports by steps_per_print, the breakdowns and the monitors' sections, as DeepSpeed does."""
import csv
import json
import os

import tessera
import torch
from checks import STAGES, check, config, folder, main, raises, standard_error
from torch import nn

rank, world = tessera.comm.get_rank(), tessera.comm.get_world_size()


def make(stage, **changes):
    torch.manual_seed(0)
    changes.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.9]}})
    return tessera.initialize(model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), config=config(stage, 300, **changes))[0]


def losses_of(engine, steps):
    """Of this rank, by optimizer step."""
    losses = []
    for step in steps:
        of_step = []
        for micro in range(engine.gradient_accumulation_steps()):
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))
            loss = engine(x).float().square().mean()
            engine.backward(loss)
            engine.step()
            of_step.append(loss.item())
        losses.append(sum(of_step) / len(of_step))
    return losses


def rows(path):
    with open(path, newline="") as file:
        head, *values = csv.reader(file)
    return head, [(int(step), float(value)) for step, value in values]


@check
def progress_is_printed_where_it_is_asked_for():
    for stage in STAGES:
        with standard_error() as said:
            losses_of(make(stage), range(12))
        assert "step=" not in said[0], said  # the default is none, as in DeepSpeed
        engine = make(stage, steps_per_print=2, optimizer={"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}})
        with standard_error() as said:
            losses_of(engine, range(5))
        lines = [line for line in said[0].splitlines() if "step=" in line]
        expected = [f"[Rank 0] step={step}, skipped=0, lr=[0.5], mom=[0.9]" for step in (2, 4)] if rank == 0 else []
        assert lines == expected, lines
    with standard_error() as said:
        losses_of(make(0, logging_steps=1), range(1))
    assert ("step=1, skipped=0, lr=[0.01], mom=[(0.8, 0.9)]" in said[0]) == (rank == 0), said


@check
def times_are_printed_by_micro_step_and_by_step():
    engine = make(3, wall_clock_breakdown=True, gradient_accumulation_steps=2)
    with standard_error() as said:
        losses_of(engine, range(2))
    lines = [line for line in said[0].splitlines() if "time (ms)" in line]
    if rank != 0:
        assert lines == []
        return
    names = [[part.split(":")[0] for part in line.split(" | ")[1:]] for line in lines]
    micro, whole = ["fwd_microstep", "bwd_microstep", "step_microstep"], ["fwd", "bwd", "step"]
    assert names == [micro, micro, whole] * 2, lines
    times = [[float(part.split(": ")[1]) for part in line.split(" | ")[1:]] for line in lines]
    for first, second, total in (times[:3], times[3:]):
        assert all(abs(a + b - c) < 0.02 for a, b, c in zip(first, second, total)) and min(total) > 0, times


@check
def the_memory_of_a_step_is_recorded():
    place = folder()
    for stage, breakdown in ((0, False), (3, False), (0, True), (3, True)):  # one with it is never undone: it counts the process
        engine = make(stage, memory_breakdown=breakdown)
        losses_of(engine, range(2))
        for ending in ("html", "json"):
            with tessera.memory_report(engine, place / f"stage{stage}.{ending}"):
                losses_of(engine, range(2, 3))
        timeline = engine.memory_timeline()
        assert [phase for phase, _ in timeline["phases"]] == ["forward", "backward", "step"], timeline["phases"]
        formula = engine._engine.formula_bytes()
        by_category = timeline["peak"]["by_category"]
        assert timeline["complete"] == breakdown
        for kind in ("parameters", "gradients", "optimizer"):
            assert by_category[kind] == formula[kind] if not breakdown else by_category[kind] >= formula[kind], (kind, by_category, formula)
        assert sum(by_category.values()) == timeline["peak"]["total"]
        named = {timeline["names"][block[6]] for block in timeline["blocks"] if block[6] >= 0}
        modules = {timeline["names"][block[5]] for block in timeline["blocks"] if block[5] >= 0}
        assert any(name.startswith("aten::") for name in named) and any("Backward" in name for name in named), named
        assert {"0", "1"} <= modules, modules
        if rank == 0:
            page = (place / f"stage{stage}.html").read_text(encoding="utf-8")
            assert f"stage {stage}" in page and "@DATA@" not in page
            assert {"M", "C", "X"} <= {event["ph"] for event in json.loads((place / f"stage{stage}.json").read_text())["traceEvents"]}
    for breakdown in (False, True):  # with it all engines have one meter
        first, second = (make(0, memory_breakdown=breakdown) for _ in range(2))
        losses_of(first, range(1))
        with tessera.memory_report(first, place / "first.html"):
            for engine in (second, first):
                raises(tessera.Error, tessera.memory_report(engine).__enter__, "a record of this or another engine is being made")
            raises(tessera.Error, first.destroy, "inside of a memory_report")
            losses_of(first, range(1, 2))
        assert [phase for phase, _ in first.memory_timeline()["phases"]] == ["forward", "backward", "step"]
        assert any("Backward" in name for name in first.memory_timeline()["names"]), first.memory_timeline()["names"]
        with tessera.memory_report(second):
            losses_of(second, range(1))
        assert second.memory_timeline()["blocks"]
    fresh = make(0)
    for wrong, error in ((lambda: fresh.memory_timeline(), tessera.Error), (lambda: tessera.memory_report(3).__enter__(), TypeError),
                         (lambda: tessera.memory_report(fresh, place / "no" / "page.html").__enter__(), tessera.Error if rank else FileNotFoundError),
                         (lambda: tessera.memory_report(fresh, place).__enter__(), tessera.Error if rank else IsADirectoryError)):
        try:
            wrong()
        except error as found:
            assert "expected" in str(found), found
        else:
            raise AssertionError("no error")
    with tessera.memory_report(fresh, (place if rank == 0 else place / "no") / "page.html"):  # the others write nothing
        losses_of(fresh, range(1))
    assert fresh.memory_timeline()["blocks"] and (rank > 0 or (place / "page.html").exists())


@check
def memory_and_the_configuration_are_printed():
    with standard_error() as said:
        losses_of(make(3, memory_breakdown=True), range(2))
    assert said[0].count("[Rank 0] memory at the peak (MB) | ") == (2 if rank == 0 else 0), said
    assert rank != 0 or "parameters " in said[0] and "total " in said[0]
    with standard_error() as said:
        make(0, dump_state=True)
    assert ('"zero_optimization"' in said[0]) == (rank == 0), said


@check
def monitors_have_deepspeeds_events():
    for stage in STAGES:
        place = folder()
        sections = {name: {"enabled": True, "output_path": str(place / name), "job_name": "x"}
                    for name in ("tensorboard", "csv_monitor", "jsonl_monitor")}
        engine = make(stage, gradient_accumulation_steps=2, scheduler={"type": "WarmupLR", "params": {
            "warmup_num_steps": 4, "warmup_max_lr": 0.01, "warmup_type": "linear"}}, wall_clock_breakdown=True, **sections)
        losses = losses_of(engine, range(3))
        samples = [4 * world * step for step in (1, 2, 3)]
        assert engine.global_samples == samples[-1]
        if rank == 0:
            head, values = rows(place / "csv_monitor" / "x" / "Train_Samples_train_loss.csv")
            assert head == ["step", "train_loss"] and [step for step, _ in values] == samples
            assert all(abs(value - loss) < 1e-6 for (_, value), loss in zip(values, losses)), (values, losses)
            _, values = rows(place / "csv_monitor" / "x" / "Train_Samples_lr.csv")
            assert [step for step, _ in values] == samples and [round(value, 9) for _, value in values] == [0.0, 0.0025, 0.005], values
            for part in ("forward", "backward", "step"):
                _, values = rows(place / "csv_monitor" / "x" / f"Train_Samples_elapsed_time_ms_{part}.csv")
                assert len(values) == 3 and min(value for _, value in values) > 0
            records = [json.loads(line) for line in (place / "jsonl_monitor" / "x" / "events.jsonl").read_text().splitlines()]
            assert records[0]["params"]["zero_optimization"]["stage"] == stage
            assert [record["step"] for record in records if "scalars" in record] == samples
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
            events = EventAccumulator(str(place / "tensorboard" / "x"))
            events.Reload()
            assert [event.step for event in events.Scalars("Train/Samples/train_loss")] == samples
            assert sorted(events.Tags()["scalars"])[-3:] == ["Train/Samples/elapsed_time_ms_step", "Train/Samples/lr", "Train/Samples/train_loss"]
        else:
            assert not (place / "csv_monitor" / "x" / "rank1").exists()
        # A resumed run continues its files: what came after the checkpoint is written anew.
        engine.save_checkpoint(place / "checkpoints")
        losses_of(engine, range(3, 5))
        del engine
        engine = make(stage, gradient_accumulation_steps=2, scheduler={"type": "WarmupLR", "params": {
            "warmup_num_steps": 4, "warmup_max_lr": 0.01, "warmup_type": "linear"}}, **sections)
        engine.load_checkpoint(place / "checkpoints")
        assert engine.global_samples == samples[-1]
        losses_of(engine, range(3, 4))
        if rank == 0:
            _, values = rows(place / "csv_monitor" / "x" / "Train_Samples_lr.csv")
            assert [step for step, _ in values] == [*samples, samples[-1] + 4 * world], values


@check
def defaults_of_monitors_are_deepspeeds_and_engines_do_not_share_a_file():
    place, before = folder(), os.getcwd()
    os.chdir(place)
    try:
        engines = [make(0, csv_monitor={"enabled": True}) for _ in range(2)]
        for step in range(2):
            for engine in engines:
                losses_of(engine, [step])
        tessera.comm.barrier()
        expected = {f"{name}/Train_Samples_{value}.csv" for name in ("DeepSpeedJobName", "DeepSpeedJobName_2") for value in ("lr", "train_loss")}
        assert {str(path.relative_to(place)) for path in place.rglob("*.csv")} == expected
        engines = [make(0, csv_monitor={"enabled": True, "output_path": path, "job_name": job})
                   for path, job in (("there", "x"), (str(place / "there"), "x"), ("./there", "x_2"))]  # one folder, in three spellings
        for step in range(2):
            for engine in engines:
                losses_of(engine, [step])
        tessera.comm.barrier()
        assert {path.parent.name for path in (place / "there").rglob("*.csv")} == {"x", "x_2", "x_2_2"}
        if rank == 0:
            assert all(len(rows(path)[1]) == 2 for path in place.rglob("*.csv"))
    finally:
        os.chdir(before)


@check
def a_destroy_that_is_refused_leaves_the_records():
    place = folder()
    engine = make(3, csv_monitor={"enabled": True, "output_path": str(place), "job_name": "z"})
    losses_of(engine, range(2))
    with tessera.GatheredParameters(engine.module.parameters()):
        raises(tessera.Error, engine.destroy, "inside of a GatheredParameters")
    losses_of(engine, range(2, 3))
    engine.destroy()
    if rank == 0:
        assert [step for step, _ in rows(place / "z" / "Train_Samples_lr.csv")[1]] == [2 * world * step for step in (1, 2, 3)]


@check
def what_was_discarded_is_in_no_event():
    for managed in (True, False):
        place, losses = folder(), []
        engine = make(2, managed_gradient_accumulation=managed, csv_monitor={"enabled": True, "output_path": str(place), "job_name": "y"})
        for step in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.zero_grad()
            losses += losses_of(engine, [step])
        assert engine.global_samples == 4 * world, engine.global_samples
        if rank == 0:
            _, values = rows(place / "y" / "Train_Samples_train_loss.csv")
            assert [step for step, _ in values] == [2 * world, 4 * world], values
            assert all(abs(value - loss) < 1e-6 for (_, value), loss in zip(values, losses, strict=True)), (values, losses)


@check
def the_loss_scale_is_an_event_in_fp16():
    place = folder()
    engine = make(2, fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 4}, csv_monitor={"enabled": True, "output_path": str(place), "job_name": "y"})
    losses_of(engine, range(2))
    if rank == 0:
        assert rows(place / "y" / "Train_Samples_loss_scale.csv")[1] == [(2 * world, 16.0), (4 * world, 16.0)]


if __name__ == "__main__":
    main()
