"""`kvpool doctor`: findings on machines of every kind, trials of devices, and the exit status."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from typing import TYPE_CHECKING, Any

import command_line
import pytest
import torch
from fake_driver import GIB, Card, FakeDriver
from machines import by_name, write

import kvpool
from kvpool.integrations.seams import numbers_of
from kvpool.integrations.versions import TRANSFORMERS
from kvpool.tools.cli import main
from kvpool.tools.doctor import examine as tool
from kvpool.tools.doctor import host, libraries
from kvpool.tools.doctor import trial as trial_module
from kvpool.tools.doctor.examine import examine
from kvpool.tools.doctor.libcuda import CallError, Driver
from kvpool.tools.doctor.libraries import EXCHANGE, torch_state
from kvpool.tools.doctor.report import VERDICTS, Finding, Report, Verdict
from kvpool.tools.doctor.trial import Outcome, TrialError, run_trial, trial

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shared_fixtures import RunSnippet

WORKS = Outcome(True, "it works")
FAILS = Outcome(False, "device cuda:0 cannot be used: it is a test")


MEMINFO = """MemTotal:  1024 kB
MemAvailable:   512 kB
HugePages_Total: 8
HugePages_Free: 3
Hugepagesize: 2048 kB
"""
MACHINE = {
    "proc/meminfo": MEMINFO,
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/node/online": "0-1,4\n",
}


def machine(root: Path, threads: int = 1) -> dict[str, Finding]:
    return by_name(host.examine(root, threads))


def test_memory_huge_pages_and_nodes_are_read(tmp_path: Path) -> None:
    found = machine(write(tmp_path, MACHINE))
    assert found["memory"].text == "1 MiB, 512 KiB available"
    assert found["reserved huge pages"].text == "3 of 8 free, 2 MiB each"
    assert (found["NUMA nodes"].text, found["NUMA nodes"].status) == ("3: 0-1,4", "ok")
    assert found["transparent huge pages"].text.startswith("madvise")
    assert "container limit" not in found
    assert "overcommit" not in found


def test_an_unknown_machine_is_reported_as_unknown(tmp_path: Path) -> None:
    found = machine(tmp_path)
    for name in ("memory", "NUMA nodes", "transparent huge pages"):
        assert found[name].status == "note"
        assert found[name].text.startswith("unknown")
    assert found["reserved huge pages"].text.startswith("none")


def test_settings_that_slow_down_come_with_advice(tmp_path: Path) -> None:
    files = {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"}
    found = machine(write(tmp_path, {**files, "proc/sys/vm/overcommit_memory": "2\n"}))
    assert "echo madvise" in found["transparent huge pages"].advice
    assert "vm.overcommit_memory=0" in found["overcommit"].advice


V2 = {"proc/self/cgroup": "0::/outer/inner\n"}
V1 = {"proc/self/cgroup": "12:memory:/outer/inner\n3:cpu,cpuacct:/outer\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({**V2, "sys/fs/cgroup/outer/inner/memory.max": f"{4 * GIB}"}, "4 GiB"),
        (
            {
                **V2,
                "sys/fs/cgroup/outer/inner/memory.max": "max",
                "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}",
                "sys/fs/cgroup/outer/memory.current": f"{GIB}",
            },
            "2 GiB, 1 GiB of it in use",
        ),
        ({**V2, "sys/fs/cgroup/outer/memory.max": "max"}, None),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}",
                "sys/fs/cgroup/memory/outer/memory.limit_in_bytes": f"{3 * GIB}",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
            },
            "3 GiB",
        ),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ({"proc/self/cgroup": "0::/../..\n", "sys/fs/cgroup/memory.max": f"{GIB}"}, "1 GiB"),
    ],
)
def test_the_smallest_limit_of_the_container_is_found(
    files: dict[str, str], text: str | None, tmp_path: Path
) -> None:
    found = machine(write(tmp_path, files))
    assert (found["container limit"].text if "container limit" in found else None) == text


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "150000 100000"}, "1.5"),
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "max 100000"}, None),
        ({**V2, "sys/fs/cgroup/outer/cpu.max": "1 0"}, None),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu,cpuacct/outer/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/outer/cpu.cfs_period_us": "100000",
            },
            "0.5",
        ),
        ({**V1, "sys/fs/cgroup/cpu/outer/cpu.cfs_quota_us": "-1"}, None),
    ],
)
def test_the_processors_of_the_container_are_found(
    files: dict[str, str], quota: str | None, tmp_path: Path
) -> None:
    usable = len(os.sched_getaffinity(0))
    finding = machine(write(tmp_path, files), threads=2)["processors"]
    expected = f", {quota} by the container's CPU quota" if quota else ""
    assert finding.text == f"{usable} usable{expected}; kvpool copies with 2 threads"
    assert finding.status == ("note" if quota or usable < 2 else "ok")


def test_limits_of_the_process_are_read() -> None:
    code = """
        import resource
        from kvpool.tools.doctor.host import _address_space, _locked
        for look, name in ((_address_space, "RLIMIT_AS"), (_locked, "RLIMIT_MEMLOCK")):
            finding = look()
            hard = resource.getrlimit(getattr(resource, name))[1]
            soft = 64 << 10 if name == "RLIMIT_MEMLOCK" else 1 << 40
            resource.setrlimit(getattr(resource, name), (soft, hard))
            limited = look()
            assert limited.status == "note", limited
            assert limited.text == ("limited to 64 KiB" if soft < 1 << 20 else "limited to 1 TiB")
            assert "ulimit" in limited.advice
            print(finding.text)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_a_system_without_limits_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    assert host._limit("RLIMIT_AS") is None
    assert host._address_space() == Finding("memory and limits", "address space", "ok", "unlimited")
    assert host._locked().text == "unlimited"


def test_a_trial_works_on_the_cpu(run_snippet: RunSnippet) -> None:
    assert "moved rows" in trial("cpu")
    assert run_trial("cpu") == Outcome(True, trial("cpu"))
    code = "from kvpool.tools.doctor.trial import main; main('cpu')"
    assert json.loads(run_snippet(code, hidden=("torch", "numpy"))) == [True, trial("cpu")]


class PatchedPool:
    """A pool with one replaced method."""

    def __init__(self, pool: Any, name: str, other: Callable[..., Any]) -> None:  # noqa: ANN401 - any pool
        self._pool, self._other = pool, (name, other)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any pool
        return self._other[1] if name == self._other[0] else getattr(self._pool, name)


@pytest.mark.parametrize(
    ("which", "name", "other", "message"),
    [
        (0, "move_kv", lambda *_: None, "a moved row holds different bytes"),
        (1, "alloc", lambda *_: None, "an empty pool has no slots"),
        (1, "available_size", lambda: 3, "3 of 64 slots are free"),
        (2, "read", lambda *_: torch.tensor([1, 2, 4], dtype=torch.int32), r"and \[1, 2, 4\] read from it"),
    ],
)
def test_a_trial_finds_wrong_results(
    which: int, name: str, other: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, make_table = kvpool.make_full_attention_net_mem_pool, kvpool.make_req_to_token_pool

    def patched(number: int, pool: Any) -> Any:  # noqa: ANN401 - any pool
        return PatchedPool(pool, name, other) if number == which else pool

    def make_both(*arguments: Any) -> tuple[Any, Any]:  # noqa: ANN401 - the factory's
        pool, allocator = make(*arguments)
        return patched(0, pool), patched(1, allocator)

    monkeypatch.setattr(kvpool, "make_full_attention_net_mem_pool", make_both)
    monkeypatch.setattr(kvpool, "make_req_to_token_pool", lambda *given: patched(2, make_table(*given)))
    with pytest.raises(TrialError, match=message):
        trial("cpu")


def test_a_trial_reports_errors_of_kvpool(capsys: pytest.CaptureFixture[str]) -> None:
    trial_module.main("cuda:77")
    works, text = json.loads(capsys.readouterr().out)
    assert not works
    assert text.startswith("device cuda:77 cannot be used: ")


def test_a_crashed_trial_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "it could not be tried: " in run_trial("cpu").text

    def ended(*_: object, **__: object) -> Any:  # noqa: ANN401 - a finished process
        return subprocess.CompletedProcess([], -11, "", "one\nSegmentation fault\n")

    monkeypatch.setattr(subprocess, "run", ended)
    assert run_trial("cpu") == Outcome(False, "the trial ended with status -11: Segmentation fault")


@pytest.mark.cuda
def test_devices_work_and_are_described() -> None:
    keep = kvpool.KVPool(64, 1, 1, 16, "cuda", "uint8")  # so that there is a context to ask
    report = examine()
    assert report.verdict("cuda").works, report.as_text()
    found = by_name(list(report.findings))
    assert found["libcuda.so.1"].text.startswith("CUDA ")
    device = Driver(ctypes.CDLL("libcuda.so.1")).describe(0)
    assert device.free_bytes is not None
    assert 0 < device.free_bytes <= device.total_bytes
    assert device.capability >= (7, 0)
    assert report.unmet(("cuda",)) == []
    del keep


@pytest.mark.cuda
def test_no_context_is_left_behind() -> None:
    code = """
        import ctypes
        from kvpool.tools.doctor.examine import examine
        assert examine().verdict("cuda").works
        library, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int(1)
        assert library.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
        assert active.value == 0
    """
    hidden = "import sys; sys.modules['torch'] = None\n"  # which would make one, on the software driver
    done = subprocess.run(
        [sys.executable, "-c", hidden + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_this_pytorch_shares_memory() -> None:
    state = torch_state(0)
    found = by_name(state.findings)
    assert (state.problem, found["torch"].text) == ("", torch.__version__)
    assert (found["DLPack exchange table"].status == "ok") == hasattr(torch.Tensor, EXCHANGE)


def test_a_missing_pytorch_differs_from_a_broken_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    assert torch_state(0).problem == "PyTorch is not installed"
    write(tmp_path, {"torch.py": "raise OSError('libtorch.so: no such file')"})
    importlib.invalidate_caches()
    state = torch_state(0)
    assert state.findings[0].status == "broken"
    assert state.problem == "importing PyTorch failed: OSError: libtorch.so: no such file"


class OldTorch:
    """The checked parts of an old PyTorch that is built for the CPU."""

    __version__ = "2.3.1+cpu"

    class Tensor:
        """Without an exchange table."""

    class version:  # noqa: N801 - as there
        """The CUDA and ROCm versions of the build."""

        cuda: str | None = None
        hip: str | None = None


def test_an_old_pytorch_for_the_cpu_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "load", lambda _: (OldTorch, ""))
    state = torch_state(1)
    found = by_name(state.findings)
    assert found["torch"].advice.endswith("pip install -U torch")
    assert found["DLPack exchange table"].advice == "pip install 'torch>=2.10'"
    monkeypatch.setattr(OldTorch, "__version__", "2.9.1")
    assert "import torch_c_dlpack_ext" in by_name(torch_state(1).findings)["DLPack exchange table"].advice
    assert "CUDA build of PyTorch" in found["CUDA build"].advice
    assert state.problem == "pools return torch.Tensor, not torch.Tensor"
    assert by_name(torch_state(0).findings)["CUDA build"].status == "ok"
    monkeypatch.setattr(OldTorch.version, "hip", "6.0")
    assert by_name(torch_state(1).findings)["CUDA build"].advice == "kvpool does not support ROCm"


def test_tensors_that_do_not_share_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make = kvpool.KVPool

    def copying(*arguments: Any) -> Any:  # noqa: ANN401 - a `KVPool`
        pool = make(*arguments)
        return PatchedPool(pool, "get_key_buffer", lambda layer: pool.get_key_buffer(layer).clone())

    monkeypatch.setattr(kvpool, "KVPool", copying)
    assert torch_state(0).problem == "a tensor of a pool does not share its memory"

    def failing(*_: object) -> Any:  # noqa: ANN401 - nothing
        raise RuntimeError("no memory")

    monkeypatch.setattr(kvpool, "KVPool", failing)
    assert torch_state(0).problem == "RuntimeError: no memory"


def test_a_package_without_cuda_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "device cuda:0 cannot be used: kvpool was built without the `cuda` feature"
    found = by_name(libraries.package(reason))
    assert (found["CUDA support"].status, found["CUDA support"].text) == ("missing", "not built in")
    found = by_name(libraries.package(FAILS.text))
    assert found["CUDA support"].status == "ok"
    assert found["kvpool"].text.startswith(kvpool.__version__)
    abis = ("stable ABI (abi3", str(sysconfig.get_config_var("SOABI")))
    assert found["extension"].text.startswith(abis)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: 1 if name == "Py_GIL_DISABLED" else "so")
    found = by_name(libraries.package(""))
    assert found["platform"].advice == "kvpool is tested on Linux only"
    assert "free-threaded" in found["Python"].text
    assert (found["Python"].status, found["Python"].advice) == ("ok", "")


def versions(monkeypatch: pytest.MonkeyPatch, **given: str | None) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        found = given.get(name, "") if name in given else real(name)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("5.21.0", "ok"),
        ("5.99.1", "ok"),
        ("5.20.9", "note"),
        ("4.57.1", "note"),
        ("6.0.0", "note"),
        (None, "missing"),
    ],
)
def test_the_version_of_transformers_is_checked(
    version: str | None, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    versions(monkeypatch, transformers=version)
    found = by_name(libraries.libraries())["transformers"]
    assert found.status == status
    assert bool(found.advice) == (status != "ok")
    if status == "ok":
        return
    if version is not None:
        assert found.text.startswith(TRANSFORMERS.why_not())
    verdict = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS}).verdict("transformers")
    assert not verdict.works


def test_the_extra_asks_for_the_versions_that_are_checked() -> None:
    [requirement] = [
        line for line in importlib.metadata.requires("kvpool") or [] if line.startswith("transformers")
    ]
    numbers = {".".join(map(str, numbers)) for numbers in (TRANSFORMERS.least, TRANSFORMERS.below)}
    assert {*re.findall(r"[<>]=?([\d.]+)", requirement)} == numbers


@pytest.mark.parametrize(
    ("version", "plugins", "status", "text"),
    [
        ("0.5.23", "kvpool", "ok", "0.5.23, on kvpool's pools"),
        ("0.5.23", "", "ok", "on its own pools; SGLANG_PLUGINS=kvpool"),
        ("0.6.0", "kvpool", "note", "0.6.0; tested are 0.5.23"),
    ],
)
def test_an_installed_sglang_is_checked(
    version: str, plugins: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    versions(monkeypatch, sglang=version)
    found = by_name(libraries.libraries())["sglang"]
    assert (found.status, bool(found.advice)) == (status, status != "ok")
    assert text in found.text
    versions(monkeypatch, sglang=None)
    assert "sglang" not in by_name(libraries.libraries())


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, ml_dtypes=None, rich=None)
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = by_name(libraries.libraries())
    for name in ("ml_dtypes", "rich", "numpy"):
        assert (found[name].status, "pip install" in found[name].advice) == ("missing", True)
    monkeypatch.setattr(libraries, "load", lambda _: (None, "ImportError: no libblas"))
    found = by_name(libraries.libraries())
    assert (found["numpy"].status, found["numpy"].text) == (
        "broken",
        "importing it failed: ImportError: no libblas",
    )


def test_versions_are_compared_by_number() -> None:
    assert numbers_of("2.10.0+cu128") > numbers_of("2.9.1") > numbers_of("2.9.0a0")[:2]
    assert numbers_of("5.21.0.dev0") == (5, 21, 0)


def diagnose(tmp_path: Path, outcomes: dict[str, Outcome], *cards: Card) -> Report:
    return examine(tmp_path, lambda _: FakeDriver(*cards), lambda device: outcomes[device])


def test_every_device_is_tried(tmp_path: Path) -> None:
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS, "cuda:1": WORKS}, Card(), Card())
    assert report.verdict("cuda").text == "on cuda:1; not on cuda:0"
    assert by_name([f for f in report.findings if f.section == "pools"])["cuda:0"].status == "broken"
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": WORKS}, Card())
    assert (report.verdict("cuda").text, report.verdict("cuda").advice) == ("on cuda:0", "")


def test_without_a_device_kvpool_gives_the_reason(tmp_path: Path) -> None:
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS})
    assert report.verdict("cuda") == Verdict(
        "cuda", 'device="cuda"', False, FAILS.text, "see 'NVIDIA driver' and 'devices' above"
    )
    assert [verdict.name for verdict in report.verdicts] == list(VERDICTS)
    assert report.unmet(()) == []
    assert [verdict.name for verdict in report.unmet(("torch", "cuda"))] == ["cuda"]


def test_nothing_works_without_cpu_pools(tmp_path: Path) -> None:
    report = diagnose(tmp_path, {"cpu": FAILS, "cuda:0": FAILS})
    assert [verdict.name for verdict in report.unmet(())] == ["cpu"]
    assert not report.verdict("transformers").works
    assert not report.verdict("replay").works
    assert not any(finding.section == "package" for finding in report.findings)


@pytest.mark.parametrize(
    ("missing", "transformers", "replay"),
    [
        ({}, True, True),
        ({"transformers": None}, False, True),
        ({"rich": None}, True, False),
        ({"numpy": None}, False, False),
    ],
)
def test_commands_need_their_libraries(
    missing: dict[str, None],
    transformers: bool,
    replay: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions(monkeypatch, **{"transformers": "5.24.0"} | missing)
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS})
    verdicts = {name: report.verdict(name) for name in ("transformers", "replay")}
    assert [verdict.works for verdict in verdicts.values()] == [transformers, replay]
    for verdict in verdicts.values():
        assert verdict.works or next(iter(missing)) in verdict.text
        assert verdict.works == ("pip install" not in verdict.advice)


def test_commands_need_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        libraries, "torch_state", lambda _: libraries.TorchState([], "it is broken", "mend it")
    )
    versions(monkeypatch, transformers="5.24.0")
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS})
    for name in ("torch", "transformers", "replay"):
        verdict = report.verdict(name)
        assert (verdict.works, verdict.text, verdict.advice) == (False, "it is broken", "mend it")


def test_the_text_includes_everything(tmp_path: Path) -> None:
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS})
    # Words longer than a line stay whole, so that they can be copied.
    lines = report.as_text().splitlines()
    assert all(len(line) <= 80 or len(line.split()) <= 2 or "->" in line for line in lines)
    assert sum(len(line) > 80 for line in lines) < len(lines) / 4
    text = " ".join(report.as_text().split())
    for finding in report.findings:
        assert f"{finding.status} {finding.name}: {' '.join(finding.text.split())}" in text
        assert finding.advice in text
    for verdict in report.verdicts:
        assert f"{verdict.title}: {verdict.text}" in text
        assert verdict.advice in text


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The report of the commands in a test."""
    report = diagnose(tmp_path, {"cpu": WORKS, "cuda:0": FAILS})
    monkeypatch.setattr(tool, "examine", lambda: report)
    return report


CUDA_COMPLAINT = f'kvpool: device="cuda" does not work: {FAILS.text}\n'


@pytest.mark.parametrize(
    ("arguments", "status", "complaint"),
    [
        ((), 0, ""),
        (("--require", "torch"), 0, ""),
        (("--require", "cuda"), 1, CUDA_COMPLAINT),
        (("--require", "torch", "--require", "cuda"), 1, CUDA_COMPLAINT),
        (("--require", "tpu"), 2, "kvpool: argument --require: invalid choice: 'tpu' "),
        (("--require", ""), 2, "kvpool: argument --require: invalid choice: '' "),
    ],
)
def test_the_exit_status_follows_the_requirements(
    arguments: tuple[str, ...], status: int, complaint: str, quick: Report
) -> None:
    result = command_line.invoke(main, ["doctor", *arguments])
    assert result.exit_code == status
    if status == 2:
        assert result.stderr.startswith(complaint)
        assert result.stderr.count("\n") == 1
    else:
        assert result.stderr == complaint
        assert result.stdout == quick.as_text() + "\n"
        found = command_line.invoke(main, ["doctor", "--json", *arguments])
        assert found.exit_code == status
        assert json.loads(found.stdout) == quick.as_json()


def test_it_runs_without_other_packages() -> None:
    """In an interpreter without site-packages: with kvpool only."""
    package = os.path.dirname(os.path.dirname(kvpool.__file__))  # noqa: PTH120
    command = [sys.executable, "-S", "-W", "error", "-m", "kvpool", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": package}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdicts"]["cpu"]["works"]
    assert found["verdicts"]["torch"]["text"] == "PyTorch is not installed"
    assert found["verdicts"]["replay"] == {
        "name": "replay",
        "title": "kvpool replay",
        "works": False,
        "text": "rich, numpy, torch not installed",
        "advice": "pip install 'kvpool[tools,torch]'",
    }


def test_this_machine_is_examined() -> None:
    report = examine()
    assert report.verdict("cpu").works, report.as_text()
    assert report.verdict("torch").works
    memory = by_name(list(report.findings))["memory"]
    assert memory.status == "ok"
    with pytest.raises(CallError, match="it has no cuNothing"):
        Driver(ctypes.CDLL(None)).call("cuNothing")


@pytest.mark.parametrize(
    ("code", "words"), [(221, "libnvidia-ptxjitcompiler"), (223, "CUDA_DISABLE_PTX_JIT"), (719, "")]
)
def test_kernels_that_do_not_load_come_with_advice(code: int, words: str) -> None:
    text = f"cuModuleLoadData failed with CUDA_ERROR_OF_SOME_KIND ({code})"
    report = examine(try_device=lambda device: Outcome(device == "cpu", text))
    [advice] = [
        found.advice for found in report.findings if (found.section, found.name) == ("pools", "cuda:0")
    ]
    assert words in advice
    assert bool(advice) == bool(words)
