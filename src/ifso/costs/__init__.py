"""MACs, parameters and activations: of a model, of what is left of it, and of each unit."""

from ifso.costs.cost import Cost, UnitCosts, cost, unit_costs

__all__ = ["Cost", "UnitCosts", "cost", "unit_costs"]
