"""From a trained network to a smaller one at a budget: selection, schedules, runs that can be resumed."""
