"""Agreement between processes: alone, and in two real processes."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import Fork, in_two_processes, launchers_store
from refused import refused

from vitinit.base.messages import OneLineError
from vitinit.programs import train
from vitinit.programs.shared import steps
from vitinit.recipe.files import load_recipe, parse_override
from vitinit.runs import data, model, resume, start
from vitinit.runs.watching import Watchers
from vitinit.train import device, distributed
from vitinit.train.device import OutOfMemory
from vitinit.train.distributed import LaunchError, LostProcess, Processes, WrongPlace, agreed
from vitinit.train.interruption import Interrupted, StopRequest

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def agreements(processes: Processes) -> list[str]:
    """Run in each of two processes: what it gets from sums, signals and errors."""
    rank = processes.rank
    lines = [
        str(processes.sum(torch.tensor([rank + 1.0])).item()),
        str(processes.maximum(15 * rank)),
        processes.from_main(lambda: f"by {rank}"),
    ]
    with pytest.raises(LaunchError, match="nothing of 0"):
        processes.from_main(lambda: refuse(f"nothing of {rank}"))
    for broken in (0, 1):  # the error of either is raised on both
        try:
            with processes.together():
                if rank == broken:
                    raise LaunchError(f"folder of {rank}")
        except OneLineError as error:
            lines.append(error.args[0])
    with pytest.raises(LaunchError, match="process 1 has files = 1 and process 0 has 0"):
        processes.require_equal({"same": 3, "files": rank})
    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank + 5.0)
    processes.share(torch.nn.Sequential(norm))
    lines.append(str(norm.running_mean.tolist()))
    forward = start.model_to_train(
        SimpleNamespace(model=norm), load_recipe("quickstart"), processes
    )
    for _ in range(2):  # its statistics stay those of its images
        forward(torch.full((2, 3), rank + 1.0))
    assert norm.running_mean.tolist() == pytest.approx([0.81 * 5 + 0.19 * (rank + 1)] * 3)
    return lines


def refuse(words: str) -> None:
    raise LaunchError(words)


def broken(count: int):
    yield from range(count)
    raise OneLineError(f"broken after {count}")


def interrupted(count: int):
    yield from range(count)
    os.kill(os.getpid(), signal.SIGUSR1)
    yield count


def outcome(items, processes: Processes) -> str:
    """The items that this process gets, and how they end."""
    seen, how = [], "end"
    with StopRequest() as stop:
        try:
            for item in agreed(items, processes, stop):
                seen.append(item)
        except (OneLineError, Interrupted) as error:
            how = str(error)
    return f"{seen} {how}"


def what_is_agreed(processes: Processes) -> list[str]:
    cases = [
        (range(2), range(5)),
        (broken(3), range(5)),
        (range(5), broken(1)),
        (range(5), interrupted(2)),
        (range(1), interrupted(3)),
        (broken(2), interrupted(2)),
    ]
    return [outcome(case[processes.rank], processes) for case in cases]


def started(processes: Processes, folder: Path) -> dict:
    """Run in each of two processes: what it starts with. On rank 1 the init draws other weights."""
    drawn = {}

    def init_weights(model, name, *, generator, **options):
        generator.manual_seed(100 + processes.rank)
        own_init(model, name, generator=generator, **options)
        drawn.update({key: value.clone() for key, value in model.state_dict().items()})

    own_init, start.init_weights = start.init_weights, init_weights
    recipe, fewer = (
        load_recipe(
            "quickstart",
            [
                *map(
                    parse_override,
                    (
                        "model.options.depth=1",
                        "model.options.embed_dim=24",
                        "ema.decay=0.9",
                        "init.name=impulse",
                        "data.name=image_folder",
                        "data.num_classes=3",
                        f"data.root={folder}",
                        "optim.global_batch=12",
                        "data.workers=0",
                        f"data.images_per_class={count}",
                    ),
                )
            ],
        )
        for count in (0, 1)
    )
    with pytest.raises(OneLineError) as refused:  # rank 1 has fewer images than a batch
        data.open_data((recipe, fewer)[processes.rank], processes, dry_run=True)
    _, images = data.open_training_set(recipe.data, recipe.run.seed)
    classifier, task = model.build(recipe), model.task_of(recipe)
    watchers = Watchers(["mass"])
    notes = start.draw_weights(classifier, classifier, recipe, task, processes, images, watchers)
    state = start.new_state(classifier, recipe, processes)
    return {
        "drawn": drawn,
        "model": dict(state.model.state_dict()),
        "notes": notes,
        "ema": dict(state.ema.model.state_dict()),
        "refused": str(refused.value),
    }


def decided(processes: Processes, folder: Path) -> list[str]:
    """Run in each of two processes: engine.amp of a new run. The other's CPU computes no bf16."""
    device.fastest_amp = lambda device: ("bf16", "fp16")[processes.rank]
    taken = []
    for changes in ([], [parse_override("engine.amp=off")]):
        request = resume.Request("quickstart", changes, folder / "new", "auto")
        _, choice = resume.choose_run(request, processes, resume.RunLock())
        processes.require_equal(choice.recipe.keys)
        taken.append(choice.recipe.engine.amp)
    return taken


def everything(folder: Path) -> list:
    with distributed.joined() as processes:
        assert decided(processes, folder) == ["bf16", "off"]
        return [agreements(processes), what_is_agreed(processes), started(processes, folder)]


def test_two_processes_agree_on_sums_items_signals_errors_and_initial_weights(image_tree, tmp_path):
    (first, items, main), (second, other_items, other) = (
        ended.result for ended in in_two_processes(everything, tmp_path, image_tree)
    )
    assert first == second == ["3.0", "15", "by 0", "folder of 0", "folder of 1", "[5.0, 5.0, 5.0]"]
    assert items == [
        "[0, 1, None, None, None] end",
        "[0, 1, 2] broken after 3",
        "[0] broken after 1",
        "[0, 1] stopped by SIGUSR1",
        "[0, None, None] stopped by SIGUSR1",
        "[0, 1] broken after 2",
    ]
    assert other_items == [
        "[0, 1, 2, 3, 4] end",
        "[0, 1, 2] broken after 3",
        "[0] broken after 1",
        "[0, 1] stopped by SIGUSR1",
        "[0, 1, 2] stopped by SIGUSR1",
        "[0, 1] broken after 2",
    ]
    assert not torch.equal(main["drawn"]["head.weight"], other["drawn"]["head.weight"])
    for key, value in main["drawn"].items():
        for found in (main["model"], main["ema"], other["model"], other["ema"]):
            assert torch.equal(found[key], value), key
    assert main["notes"][0].startswith("mass    ")
    assert other["notes"] == []  # only the main process prints
    assert "has 3 images" in main["refused"] == other["refused"]  # an error of the other's, too


@pytest.mark.parametrize(
    "error, lost",
    [
        (RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [10.0.0.2]:3"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("[../gloo/pair.cc:3] writev [10.0.0.2]:3: Broken pipe"), True),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_broken_connection_is_one_line_of_each_process_a_defect_none(monkeypatch, error, lost):
    """Where there is no other process, none is lost."""
    monkeypatch.setattr(distributed, "start", lambda: ALONE)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match=re.escape(str(error))), distributed.joined():
        raise error
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LostProcess if lost else RuntimeError) as caught, distributed.joined():
        raise error
    assert isinstance(caught.value, LostProcess) == lost
    if lost:
        assert caught.value.__cause__ is error
        assert caught.value.of_one_process and "\n" not in str(caught.value)
        assert str(caught.value).startswith("process 0 lost another one, which has ended")


def test_of_nccls_words_the_reason_is_quoted_which_is_at_their_end(monkeypatch):
    error = torch.distributed.DistBackendError(
        "NCCL error in: a/long/path/of/torch/NCCLUtils.cpp:94, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: System call failed.\n"
        "Last error:\nNo space left on device"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed.lost_connection(error) == "No space left on device"


@pytest.mark.parametrize(
    "error, left",
    [
        (None, True),
        (LaunchError("of all"), True),
        (Interrupted(15), True),
        (OutOfMemory("of one"), False),
        (RuntimeError("a defect"), False),
        (OSError("disk"), False),
    ],
)
def test_with_gpus_the_group_is_left_unless_one_process_alone_has_failed(monkeypatch, error, left):
    done = []
    monkeypatch.setattr(distributed, "start", lambda: ALONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: done.append("left"))
    monkeypatch.setattr(distributed.atexit, "register", lambda *given: done.append(given))
    with pytest.raises(type(error)) if error else nullcontext(), distributed.joined():
        if error:
            raise error
    assert done == ["left" if left else (os._exit, 1)]


def test_the_error_of_one_process_is_printed_before_python_ends():
    code = (
        "import torch; from vitinit.train import distributed\n"
        "distributed.start = lambda: None\n"
        "torch.distributed.is_initialized = torch.cuda.is_available = lambda: True\n"
        "with distributed.joined(): raise OSError('disk full')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.endswith("OSError: disk full\n")


def test_what_cannot_be_started_is_one_line(monkeypatch):
    """More processes than GPUs; and tasks of srun, each of which would be a run of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for tasks, environment, words in (
        ("4", {}, "several tasks of SLURM, .* srun --ntasks-per-node=1 torchrun"),
        ("4", {"RANK": "0"}, ""),
        ("1", {}, ""),
        ("1", {"LOCAL_RANK": "2"}, "process 2 of this machine has no GPU: 2 are visible"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv("SLURM_NTASKS", tasks)
            for name, value in environment.items():
                patch.setenv(name, value)
            if "LOCAL_RANK" in environment:
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "device_count", lambda: 2)
            if not words:
                assert distributed.start() == ALONE
                continue
            assert re.search(words, refused(LaunchError, distributed.start))


TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "used"}


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"RANK": "x"}, "RANK=x in the environment; expected an integer from 0 to 0, as torchrun"),
        ({"RANK": "3"}, "RANK=3 in"),
        ({"RANK": "9" * 5000}, "RANK=999"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK=1.0 in"),
        ({"LOCAL_RANK": "32768"}, "LOCAL_RANK=32768 in .* from 0 to 32767"),
        ({"WORLD_SIZE": "32768"}, "WORLD_SIZE=32768 in .* from 1 to 32767"),
        (TWO | {"RANK": ""}, "RANK= in the environment; expected an integer from 0 to 1"),
        (TWO | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 in .* from 1 to 65535"),
        (TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR=: no such machine is known here"),
        (TWO | {"MASTER_ADDR": "a" * 70}, "MASTER_ADDR=a+: no such"),
        (TWO, r"MASTER_PORT=\d+: in use, say; The server socket has failed"),
    ],
)
def test_an_environment_that_no_launcher_sets_is_one_line_of_each_process(
    monkeypatch, capsys, variables, words
):
    monkeypatch.setattr(distributed, "WAITS", (0, 0))
    with socket.create_server(("localhost", 0)) as used:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(used.getsockname()[1]) if value == "used" else value)
        assert train.main(["--recipe", "quickstart", "--dry-run"]) == 2
    assert re.fullmatch(f"train.py: {words}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("known_after", [0, 1, 2, 3, 4, None])
def test_an_address_that_becomes_known_within_15_seconds_is_taken(monkeypatch, known_after):
    looks, waited = [], []

    def look(address: str, port: object) -> None:
        looks.append(address)
        if len(looks) - 1 != known_after:
            raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=waited.append))
    if known_after is None:
        line = refused(WrongPlace, distributed.require_address, "late")
        assert line.startswith("MASTER_ADDR=late: no such machine is known here")
    else:
        distributed.require_address("late")
    assert sum(waited) == 15 if known_after is None else sum(waited) == 2**known_after - 1
    assert len(looks) == (5 if known_after is None else known_after + 1)
    waited.clear()
    refused(WrongPlace, distributed.require_address, "")  # which will never be one
    assert sum(waited) == 0


def sum_of_ranks() -> float:
    with distributed.joined() as processes:
        return float(processes.sum(torch.tensor(1.0 + processes.rank)))


def test_processes_that_are_started_again_find_each_other_and_none_of_before(tmp_path):
    """torchrun's store still has the addresses at which the first two do not listen any more."""
    store = launchers_store()
    for attempt in (0, 1):
        for ended in in_two_processes(
            sum_of_ranks, tmp_path / str(attempt), store=store, attempt=attempt
        ):
            assert ended.result == 3.0


def test_a_process_that_does_not_come_is_one_line(monkeypatch):
    store = launchers_store()
    clock = SimpleNamespace(monotonic=count(0, 100).__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(distributed, "time", clock)
    for name, value in TWO.items():
        monkeypatch.setenv(name, str(store.port) if value == "used" else value)
    for name, value in (("RUN_ID", "tests"), ("USE_AGENT_STORE", "True")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    line = refused(LostProcess, distributed.start)
    assert line == "process 0 waited 60 s for process 1 of 2, in vain"


def test_what_a_tensor_frees_on_a_cpu_is_kept_for_the_next(monkeypatch, tmp_path):
    """In a run, which a new process shows, and in a benchmark, which asks for the same."""
    code = (
        "import torch, resource as r; from vitinit.train.distributed import start; start()\n"
        "for _ in range(17): before = r.getrusage(0).ru_minflt; torch.ones(2**24)\n"
        "print(r.getrusage(0).ru_minflt - before)"
    )  # 64 MiB, so 16,384 pages
    found = Fork(partial(exec, code, {}), tmp_path / "fork", "forkserver", CUDA_VISIBLE_DEVICES="")
    assert int(found.ended().out) < 1000
    asked = []
    monkeypatch.setattr(steps, "keep_freed_memory", lambda: asked.append(True))
    steps.clock_of(torch.device("cpu"))
    assert asked


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a system with large pages"
)
def test_large_pages_are_asked_for_on_a_cpu(tmp_path):
    code = (
        "import torch; from vitinit.train.distributed import start; start()\n"
        "there = torch.empty(2**22).data_ptr() + 2**23\n"  # in its middle
        "for line in open('/proc/self/smaps'):\n"
        "    first, *rest = line.split()\n"
        "    if '-' in first:\n"  # a range of addresses
        "        low, high = (int(end, 16) for end in first.split('-'))\n"
        "    elif first == 'VmFlags:' and low <= there < high:\n"
        "        print(*rest)"
    )
    found = Fork(partial(exec, code, {}), tmp_path / "fork", "forkserver", CUDA_VISIBLE_DEVICES="")
    assert "hg" in found.ended().out.split()
