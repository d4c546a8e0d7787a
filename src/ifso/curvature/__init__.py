"""Second derivatives of the loss without matrices: exact products, inverse solvers, true loss changes."""
