"""Inverse-curvature solvers: u ≈ H⁻¹v behind one protocol. To add one, write a short file and name it here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ifso.curvature.objective import Solution, Solver, SolverWarning, warn_note
from ifso.curvature.solvers.fisher import Kfac, ShermanMorrison
from ifso.curvature.solvers.iterative import ConjugateGradients, Identity, Neumann
from ifso.curvature.solvers.jacobian import JacobianRows
from ifso.errors import ScoreError

SOLVERS: dict[str, type[Any]] = {
    "identity": Identity,
    "neumann": Neumann,
    "sherman-morrison": ShermanMorrison,
    "cg": ConjugateGradients,
    "kfac": Kfac,
    "jacobian": JacobianRows,
}

__all__ = [
    "SOLVERS",
    "ConjugateGradients",
    "Identity",
    "JacobianRows",
    "Kfac",
    "Neumann",
    "ShermanMorrison",
    "Solution",
    "Solver",
    "SolverWarning",
    "create_solver",
    "warn_note",
]


def create_solver(solver: str | Solver, **options: Any) -> Solver:
    """A solver by name with its options, or the solver itself.

    >>> create_solver("identity", scale=10.0)
    Identity(scale=10.0)
    """
    if not isinstance(solver, str):
        if options:
            raise ScoreError(f"options {', '.join(options)} go with a solver's name, not with a solver that is made")
        return solver
    if solver not in SOLVERS:
        raise ScoreError(f"solver {solver!r} is unknown; choose one of {', '.join(SOLVERS)}")
    known = [field.name for field in fields(SOLVERS[solver])]
    for name in options:
        if name not in known:
            raise ScoreError(f"solver {solver!r} has no option {name!r}; its options are {', '.join(known)}")
    return SOLVERS[solver](**options)
