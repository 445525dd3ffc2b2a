"""The bytes of 8-bit latents, held against a reading of the layout that shares nothing with specdec: numpy and arithmetic.

Shapes: N tokens, C latent rank, R rotated dim, L = C + R, X bytes of a row.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import dequantise_latents, parts_of, quantise_latents, row_bytes

DIMS = [(512, 64), (128, 16), (384, 6)]
TINY = 2.0**-126  # the smallest normal float32


def e4m3(byte: int) -> float:
    """What an e4m3 byte stands for, by the format's definition: a sign bit, 4 of exponent (bias 7), 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


NUMBERS = np.array([e4m3(byte) for byte in range(256)])


def read_by_numpy(row: np.ndarray, C: int, R: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(latent, scales, rotated part) of one row of bytes, in float64."""
    scales = np.frombuffer(row[C : C + C // 32].tobytes(), "<f4").astype(np.float64)
    halves = np.frombuffer(row[C + C // 32 :].tobytes(), "<u2").astype(np.uint32)
    rope = (halves << 16).view(np.float32).astype(np.float64)
    return NUMBERS[row[:C]] * scales.repeat(128), scales, rope


def latents(N: int, C: int, R: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random latents whose groups differ in size, with zeros and very small and large numbers among them."""
    generator = torch.Generator().manual_seed(C + R)
    sizes = 10.0 ** torch.randint(-3, 3, (N, C // 128), generator=generator).repeat_interleave(128, 1)
    latent_NL = torch.randn(N, C + R, generator=generator)
    latent_NL[:, :C] *= sizes
    latent_NL[0, :128], latent_NL[1, :128], latent_NL[2, :128] = 0, 1e-41, latent_NL[2, :128] * 1e30
    return latent_NL.to(dtype)


@pytest.mark.parametrize(("C", "R"), DIMS)
def test_the_bytes_are_those_of_the_layout(C: int, R: int) -> None:
    """Keeps out: parts in another order, scales of a neighbour's group, values rounded down, a quantised rotated part."""
    latent_NL = latents(20, C, R)
    rows_NX = quantise_latents(latent_NL, C).numpy()
    assert rows_NX.shape == (20, C + 4 * C // 128 + 2 * R)
    for row, wanted in zip(rows_NX, latent_NL.double().numpy()):
        got, scales, rope = read_by_numpy(row, C, R)
        groups = np.abs(wanted[:C]).reshape(-1, 128).max(1)
        np.testing.assert_allclose(scales, np.maximum(groups / 448, TINY), rtol=1e-6)
        steps = wanted[:C] / scales.repeat(128)
        distance = np.abs(NUMBERS[None] - steps[:, None])
        nearest = np.nanmin(distance, axis=1)
        assert (np.abs(got / scales.repeat(128) - steps) <= nearest * (1 + 1e-6) + 1e-6).all()
        np.testing.assert_allclose(rope, wanted[C:], rtol=2.0**-8)
        np.testing.assert_array_equal(rope, torch.tensor(wanted[C:]).bfloat16().double().numpy())


def test_deepseek_s_row_has_656_bytes_and_its_items_where_other_programs_look() -> None:
    """Keeps out: a layout that only specdec can read, and a row that takes as much as two bytes a number."""
    assert row_bytes(512, 64) == 656 < 1152 == 2 * (512 + 64)
    latent_NL = latents(3, 512, 64)
    rows_NX = quantise_latents(latent_NL, 512)
    scales = rows_NX.view(torch.float32)[:, 128:132]
    assert torch.equal(scales, (latent_NL[:, :512].abs().unflatten(1, (4, 128)).amax(2) / 448).clamp(min=TINY))
    assert torch.equal(rows_NX.view(torch.bfloat16)[:, 264:328], latent_NL[:, 512:].bfloat16())
    parts = parts_of(rows_NX, 512)
    assert parts.latent_NC.shape == (3, 512) and torch.equal(parts.scales_NG, scales) and parts.rope_NR.shape == (3, 64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unpacking_says_what_the_bytes_say(dtype: torch.dtype) -> None:
    """Keeps out: products in 8 or 16 bits, a scale on the rotated part."""
    latent_NL = latents(12, 128, 16)
    latent_NL[2] = 0  # its 1e30 does not fit float16
    rows_NX = quantise_latents(latent_NL, 128)
    got_NL = dequantise_latents(rows_NX, 128, dtype)
    assert got_NL.dtype == dtype
    for row, got in zip(rows_NX.numpy(), got_NL):
        latent, _, rope = read_by_numpy(row, 128, 16)
        wanted = torch.from_numpy(np.concatenate((latent, rope))).float().to(dtype)
        assert torch.equal(got, wanted)


def test_values_are_rounded_to_even_and_never_become_nan() -> None:
    """Keeps out: ties rounded up (a bias); a group's largest value divided to just above 448, which is NaN in e4m3."""
    group = torch.zeros(1, 128 + 2)
    group[0, :8] = torch.tensor([448.0, 17.0, 19.0, 21.0, -17.0, -19.0, 2.0**-10, 3 * 2.0**-10])
    got = dequantise_latents(quantise_latents(group, 128), 128, torch.float32)[0, :8]
    assert got.tolist() == [448.0, 16.0, 20.0, 20.0, -16.0, -20.0, 0.0, 2.0**-8]
    many = torch.rand(5000, 130, generator=torch.Generator().manual_seed(3)) * 10
    got = dequantise_latents(quantise_latents(many, 128), 128, torch.float32)
    assert got.isfinite().all() and float((got[:, :128] - many[:, :128]).norm() / many[:, :128].norm()) < 0.03


def test_a_tokens_bytes_depend_on_its_latent_alone() -> None:
    """Keeps out: a scale that a pass's other tokens have a part in, so that a token stored in a chunk would differ."""
    latent_NL = latents(9, 128, 16)
    whole = quantise_latents(latent_NL, 128)
    assert all(torch.equal(whole[n : n + 1], quantise_latents(latent_NL[n : n + 1], 128)) for n in range(9))
