"""What ifso itself costs, as multiples of what a user knows: one gradient."""
