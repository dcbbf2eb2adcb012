"""Studies made of many runs: their grids, their schedule in virtual time, and what comes out of them."""
