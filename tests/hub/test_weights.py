"""A cut of a mapped tensor holds what the same cut of the whole array holds."""

import pathlib

import numpy as np
import pytest

from trireme.blocks import BLOCKS
from trireme.errors import BadCheckpoint
from trireme.hub.weights import map_file, num_bytes, weight_from_bytes


def plain(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype="<f4").reshape(shape)


def test_cuts_of_plain_tensors_compose() -> None:
    array = plain((12, 8))
    weight = weight_from_bytes("w", "F32", array.shape, array.view(np.uint8).reshape(-1))
    order = np.array([5, 1, 7, 7])
    cut = weight.rows(slice(2, 10)).rows(order).rows(slice(1, 3)).columns(slice(2, 6))
    expected = array[2:10][order][1:3][:, 2:6]
    assert cut.shape == expected.shape
    assert cut.num_bytes == expected.nbytes
    np.testing.assert_array_equal(cut.raw(), expected)
    assert cut.raw().flags.c_contiguous


def test_bf16_comes_as_its_bits() -> None:
    bits = np.arange(6, dtype="<u2")
    weight = weight_from_bytes("w", "BF16", (2, 3), bits.view(np.uint8))
    assert weight.raw().dtype == np.uint16
    np.testing.assert_array_equal(weight.rows(slice(1, 2)).raw(), bits.reshape(2, 3)[1:])


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_cut_whole(kind: str) -> None:
    values, size = BLOCKS[kind]
    shape = (6, 4 * values)
    data = np.random.default_rng(0).integers(0, 256, num_bytes("w", kind, shape), dtype=np.uint8)
    weight = weight_from_bytes("w", kind, shape, data)
    rows = data.reshape(6, 4 * size)
    assert weight.shape == shape
    cut = weight.columns(slice(values, 3 * values)).rows(np.array([4, 0]))
    assert cut.shape == (2, 2 * values)
    np.testing.assert_array_equal(cut.raw(), rows[[4, 0], size : 3 * size])
    with pytest.raises(BadCheckpoint, match="blocks"):
        weight.columns(slice(1, values))


def test_part_is_one_of_a_stack() -> None:
    array = plain((3, 4, 2))
    weight = weight_from_bytes("w", "F32", array.shape, array.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(weight.part(1).rows(slice(1, 3)).raw(), array[1, 1:3])


def test_vectors_and_scalars() -> None:
    array = plain((8,))
    weight = weight_from_bytes("b", "F32", (8,), array.view(np.uint8))
    np.testing.assert_array_equal(weight.rows(np.array([3, 1])).columns(slice(0, 1)).raw(), array[[3]])
    scalar = weight_from_bytes("s", "F32", (), array[:1].view(np.uint8))
    assert scalar.raw().shape == () and scalar.shape == ()


def test_rows_outside_are_refused() -> None:
    weight = weight_from_bytes("b", "F32", (8,), plain((8,)).view(np.uint8))
    with pytest.raises(BadCheckpoint, match="has 8"):
        weight.rows(np.array([8]))


def test_a_released_tensor_gives_its_memory_back_and_reads_as_before(tmp_path: pathlib.Path) -> None:
    array, path = plain((4096, 512)), tmp_path / "file"
    path.write_bytes(b"odd" * 1001 + array.tobytes())
    weight = weight_from_bytes("w", "F32", array.shape, map_file(path)[3003:])
    np.testing.assert_array_equal(weight.raw(), array)
    assert _resident(path) >= array.nbytes
    weight.rows(slice(0, 2048)).release()
    assert _resident(path) < 0.6 * array.nbytes
    np.testing.assert_array_equal(weight.raw(), array)
    weight_from_bytes("memory", "F32", array.shape, array.view(np.uint8).reshape(-1)).release()


def _resident(path: pathlib.Path) -> int:
    """Bytes of a mapped file that are in this process's memory, as Linux counts them."""
    if not pathlib.Path("/proc/self/smaps").exists():
        pytest.skip("only Linux says what is resident")
    found, total = False, 0
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
