"""Fixtures for every test that needs a model: random ones are written once per session."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from support import chance, where
from support.arch_table import TableWriter
from support.architectures import ArchSpec, write_architecture
from support.kv_types import BLOCKS, EVEN_BLOCKS, QUANTIZED
from support.models import SMALL, TINY, WIDE, WINDOW, ModelSpec, write_model

if TYPE_CHECKING:  # tests/unit runs without the native library
    import pykvgraph as kvg

# a loaded machine is no failure; `support.chance` says when the examples are others than the last time's
hypothesis.settings.register_profile("ours", deadline=None, derandomize=not chance.SEED, database=None)
hypothesis.settings.load_profile("ours")
if chance.SEED:
    hypothesis.core.global_force_seed = chance.SEED  # type: ignore[assignment]  # what pytest's --hypothesis-seed sets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="run the tests marked any_device, there")
    parser.addoption("--kv-tier", default="device", choices=["device", "host"], help="where K and V are then")
    parser.addoption("--few", type=int, metavar="N", help="at most N sets of parameters of each test")
    parser.addoption(
        "--write-architectures", action="store_true", help="write docs' table of what these tests compared"
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        where.choose(config.getoption("--device"), config.getoption("--kv-tier"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    if config.getoption("--write-architectures") and not hasattr(config, "workerinput"):  # xdist's workers
        config.pluginmanager.register(TableWriter())


def pytest_report_header() -> list[str]:
    """Which trials these are, where they aren't a commit's."""
    return [f"trials at random: KVGRAPH_SEED={chance.SEED} makes these again"] if chance.SEED else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On another device nothing runs that is the CPU's alone; with --few, not every set of parameters."""
    for item in items:
        if chance.decides(item.path):
            item.add_marker("at_random")
    chosen = [item for item in items if where.is_cpu() or item.get_closest_marker("any_device")]
    if few := config.getoption("--few"):
        chosen = few_of_each(chosen, few)
    left = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = chosen


def few_of_each(items: list[pytest.Item], few: int) -> list[pytest.Item]:
    """Of each test function's parameters so many at most, spread evenly; other functions begin elsewhere."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for name, each in by_function.items():
        n = min(few, len(each))
        first = zlib.crc32(name.encode()) % (len(each) // n)
        chosen.update(each[first + i * len(each) // n] for i in range(n))
    return [item for item in items if item in chosen]


DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelSpec], Path]:
    """Path of a random model, written on first use."""
    directory = tmp_path_factory.mktemp("models")
    return lambda spec: write_model(spec, directory)


@pytest.fixture(scope="session")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ArchSpec], Path]:
    """Path of a random model of some architecture, written on first use."""
    directory = tmp_path_factory.mktemp("architectures")
    return lambda spec: write_architecture(spec, directory)


@pytest.fixture(scope="session")
def tiny(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """One layer of 16: for tests of the cells, where K and V only have to be there."""
    import pykvgraph as kvg

    with kvg.Model(model_file(TINY), device=where.device) as model:
        yield model


@pytest.fixture(scope="session")
def small(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """Two layers of 64, grouped heads: for tests of what is computed."""
    import pykvgraph as kvg

    with kvg.Model(model_file(SMALL), device=where.device) as model:
        yield model


@pytest.fixture(scope="session")
def other(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """The small model with other weights: as its draft, it proposes what is wrong."""
    import pykvgraph as kvg

    with kvg.Model(model_file(replace(SMALL, seed=SMALL.seed + 1)), device=where.device) as model:
        yield model


@pytest.fixture(scope="session")
def holder(
    model_file: Callable[[ModelSpec], Path], small: kvg.Model
) -> Iterator[Callable[[tuple[str, str]], kvg.Model]]:
    """A model for a cache of these types: `small` when none is quantized, else one with heads of a block.

    They are even in number when one of K and V is quantized, odd when both are and this is the CPU.
    """
    import pykvgraph as kvg

    with (
        kvg.Model(model_file(BLOCKS), device=where.device) as odd,
        kvg.Model(model_file(EVEN_BLOCKS), device=where.device) as even,
    ):

        def hold(kv_types: tuple[str, str]) -> kvg.Model:
            n_quantized = sum(kind in QUANTIZED for kind in kv_types)
            # other devices take rows of whole words only
            return (small, even, odd if where.is_cpu() else even)[n_quantized]

        yield hold


@pytest.fixture(scope="session")
def windowed(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """One layer, which sees WINDOW positions: what it says of a token depends on these alone."""
    yield from _with_window(model_file(ModelSpec(n_layer=1)))


@pytest.fixture(scope="session")
def mixed(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """Two layers, of which the first sees WINDOW positions and the second all."""
    yield from _with_window(model_file(SMALL))


def _with_window(path: Path) -> Iterator[kvg.Model]:
    from support.faults import fault

    import pykvgraph as kvg

    with fault("window", WINDOW):  # while it is loaded
        model = kvg.Model(path, device=where.device)
    with model:
        yield model


@pytest.fixture(scope="session")
def wide(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    """Rows of 64 KiB: for tests of updates that take several graphs."""
    import pykvgraph as kvg

    with kvg.Model(model_file(WIDE), device=where.device) as model:
        yield model


@pytest.fixture(scope="session")
def stories() -> Path:
    """Karpathy's TinyStories model of 260K parameters."""
    return DATA / "stories260K.gguf"


@pytest.fixture(scope="session")
def golden_story() -> str:
    """What llama2.c published as that model's greedy story."""
    return (DATA / "stories260K.golden.txt").read_text(encoding="utf-8")
