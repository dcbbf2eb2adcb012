"""Staleness gate, schedule, ledger and the state machine that joins them."""

from areal_jax.controller.answers import ControllerError, StalenessError, Waiting
from areal_jax.controller.controller import Controller
from areal_jax.controller.gate import StalenessGate
from areal_jax.controller.ledger import Ledger, LedgerBalance, LedgerError
from areal_jax.controller.schedule import Candidate, Plan, plan_step

__all__ = [
    "Candidate",
    "Controller",
    "ControllerError",
    "Ledger",
    "LedgerBalance",
    "LedgerError",
    "Plan",
    "StalenessError",
    "StalenessGate",
    "Waiting",
    "plan_step",
]
