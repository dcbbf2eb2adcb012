"""What machines a plan is for: ``--topology`` read and checked.

h800:48x8     48 hosts of 8 devices          v6e:16x16    a slice of 16 x 16 chips
h100:64       64 devices, in hosts of 8      v5p:4x4x8    a slice of 4 x 4 x 8 chips
h100:8..512   8, 16, 32, ... 512 devices     v5e:256      a slice of 256 chips, as square as can be
cpu:8         8 virtual devices of this host, for self-checks
"""

from __future__ import annotations

import dataclasses
import math
import re

from areal_jax.config import ConfigError
from areal_jax.planner.hardware import Chip, find_chip

EXAMPLES = "as in h800:48x8 (hosts x devices), h100:64, h100:8..512, v5e:256, v6e:16x16, v5p:4x4x8 or cpu:8"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
      chip: the kind.
      shape: (hosts, devices of a host) behind a switch, or the sides of a slice's torus.
      domain: neighbouring devices that ``chip.link`` joins.
    """

    chip: Chip
    shape: tuple[int, ...]
    domain: int

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        return -(-self.devices // self.chip.host) if self.chip.dimensions else self.shape[0] if len(self.shape) == 2 else 1

    @property
    def listed(self) -> bool:
        """Whether a slice is one that is rented out; anything else always is."""
        cubes = self.chip.dimensions == 3 and all(side % 4 == 0 for side in self.shape)
        return not self.chip.dimensions or cubes or tuple(sorted(self.shape)) in {tuple(sorted(sides)) for sides in self.chip.slices}

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"


def parse_topologies(text: str) -> list[Topology]:
    """The topologies that ``--topology`` names: one, or one a size for a range.

    Raises:
      ConfigError: on a chip that is not known or a size that there is not.
    """
    name, colon, size = text.strip().lower().partition(":")
    chip = find_chip(name)
    if not colon:
        raise ConfigError(f"'--topology' must say how many devices, {EXAMPLES}; got '{text}'")
    span = re.fullmatch(r"(\d+)\.\.(\d+)", size)
    if span:
        first, last = int(span[1]), int(span[2])
        if not 0 < first < last:
            raise ConfigError(f"'--topology': a range rises from at least 1, as in h100:8..512; got '{size}'")
        sizes = []
        while first <= last:
            sizes.append(first)
            first *= 2
        return [_topology(chip, (n,), text) for n in sizes]
    if not re.fullmatch(r"\d+(x\d+)*", size):
        raise ConfigError(f"'--topology' must be chip:size, {EXAMPLES}; got '{text}'")
    return [_topology(chip, tuple(int(part) for part in size.split("x")), text)]


def _topology(chip: Chip, shape: tuple[int, ...], text: str) -> Topology:
    devices = math.prod(shape)
    if devices < 2:
        raise ConfigError(f"'--topology' must have at least 2 devices, one for each role; got '{text}'")
    if chip.dimensions:
        if devices > chip.domain:
            raise ConfigError(f"'--topology': a {chip.name} slice has at most {chip.domain} chips; got {devices}; plan for one slice")
        shape = _sides(devices, chip.dimensions) if len(shape) == 1 else shape
        if len(shape) != chip.dimensions:
            raise ConfigError(
                f"'--topology': a {chip.name} slice has {chip.dimensions} sides, as in {chip.name}:{'x'.join(['4'] * chip.dimensions)}; got '{text}'"
            )
        return Topology(chip, shape, devices)
    if chip.name == "cpu":
        return Topology(chip, (devices,), devices)
    if len(shape) == 1:
        if devices > chip.host and devices % chip.host:
            raise ConfigError(f"'--topology': {chip.name} hosts have {chip.host} devices; {devices} is no multiple; say hosts x devices, {EXAMPLES}")
        shape = (max(1, devices // chip.host), min(devices, chip.host))
    if len(shape) != 2 or shape[1] > chip.domain:
        raise ConfigError(f"'--topology' of {chip.name} is hosts x devices with at most {chip.domain} devices a host; got '{text}'")
    return Topology(chip, shape, shape[1])


def _sides(devices: int, dimensions: int) -> tuple[int, ...]:
    """Sides, rising, whose product is ``devices``, as equal as can be."""
    if dimensions == 1:
        return (devices,)
    side = next(s for s in range(round(devices ** (1 / dimensions)), 0, -1) if devices % s == 0)
    return (side, *_sides(devices // side, dimensions - 1))
