"""What one accelerator can do: vendors' figures, dense and without sparsity, each with its source.

Invariants:
* Rates are per device and per direction; a link's rate is that of all its lanes together.
* Memory is what the runtime shows, not all of which a program can have (``USABLE``).
"""

from __future__ import annotations

import dataclasses
import difflib

from areal_jax.config import ConfigError

GIB = 2**30
USABLE = 0.92
"""Share of a device's memory that a program may plan with; the rest is the runtime's, collectives' buffers and fragmentation."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of device.

    Attributes:
      name: as in ``--topology``.
      flops: dense bfloat16 FLOP/s.
      memory: bytes.
      bandwidth: bytes/s between memory and cores.
      link: bytes/s to the devices of its domain (NVLink of a host, ICI of a slice).
      network: bytes/s to devices outside its domain.
      host: devices of a host.
      domain: most devices within reach of ``link``.
      dimensions: of the slice's torus; 0 for a switch.
      source: where the figures are from.
      slices: sides of the slices that are rented out; empty for a switch.
    """

    name: str
    flops: float
    memory: int
    bandwidth: float
    link: float
    network: float
    host: int
    domain: int
    dimensions: int
    source: str
    slices: tuple[tuple[int, ...], ...] = ()

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.memory * USABLE)


_NVIDIA = "NVIDIA data sheet; dense bf16 is half of the sheet's figure with sparsity, NVLink half of its sum of both directions"
_CLOUD = "Google Cloud TPU system architecture pages; ICI half of its sum of both directions, network a pod's divided by its chips"

_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24))
"""Slices of Cloud TPU (the system architecture pages' tables); v5p has others of whole cubes of 4 x 4 x 4 too."""

CHIPS = {
    chip.name: chip
    for chip in (
        # A100 80GB SXM: 312 TFLOP/s, 2,039 GB/s, NVLink 600 GB/s; DGX A100: one 200 Gb/s HDR port a GPU.
        Chip("a100", 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 8, 8, 0, _NVIDIA),
        # H100 SXM: 989 TFLOP/s, 3.35 TB/s, NVLink 900 GB/s; DGX H100: one 400 Gb/s NDR port a GPU.
        Chip("h100", 989e12, 80 * GIB, 3.35e12, 450e9, 50e9, 8, 8, 0, _NVIDIA),
        # H800 SXM: an H100 with NVLink cut to 400 GB/s; the paper's nodes have 3.2 Tb/s RoCE for 8 (arXiv 2505.24298, section 7.1).
        Chip("h800", 989e12, 80 * GIB, 3.35e12, 200e9, 50e9, 8, 8, 0, _NVIDIA + "; network from arXiv 2505.24298"),
        # H200 SXM: as H100 with 141 GB and 4.8 TB/s.
        Chip("h200", 989e12, 140 * GIB, 4.8e12, 450e9, 50e9, 8, 8, 0, _NVIDIA),
        # HGX B200: 2.25 PFLOP/s, 180 GB, 7.7 TB/s, NVLink 1.8 TB/s; DGX B200: one 400 Gb/s port a GPU.
        Chip("b200", 2250e12, 178 * GIB, 7.7e12, 900e9, 50e9, 8, 8, 0, _NVIDIA),
        # v5e: 197 TFLOP/s, 16 GB, 819 GB/s, ICI 400 GB/s; 6.4 Tb/s a pod of 256.
        Chip("v5e", 197e12, 16 * GIB, 819e9, 200e9, 3.1e9, 8, 256, 2, _CLOUD, _SQUARES),
        # v5p: 459 TFLOP/s, 95 GB, 2,765 GB/s, ICI 1,200 GB/s; 50 Gb/s a chip.
        Chip("v5p", 459e12, 95 * GIB, 2.765e12, 600e9, 6.25e9, 4, 8960, 3, _CLOUD, _CUBES),
        # v6e: 918 TFLOP/s, 32 GB, 1,638 GB/s, ICI 800 GB/s; 25.6 Tb/s a pod of 256.
        Chip("v6e", 918e12, 32 * GIB, 1.638e12, 400e9, 12.5e9, 8, 256, 2, _CLOUD, _SQUARES),
        # A host's virtual devices, for self-checks: the memory predictions hold, the times mean nothing.
        Chip("cpu", 1e11, 2 * GIB, 1e10, 1e10, 1e10, 8, 4096, 0, "nominal figures of a self-check"),
    )
}


GPUS = tuple(name for name, chip in CHIPS.items() if chip.source.startswith(_NVIDIA))


def find_chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
      ConfigError: it is not in the table; names the nearest.
    """
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"'--topology': unknown chip '{name}'; {hint}Chips are {', '.join(CHIPS)}; another is one line in areal_jax/planner/hardware.py")
    return CHIPS[name]
