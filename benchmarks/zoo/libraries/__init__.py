"""Networks of other libraries, built with random weights, each with what it takes to run and to train."""
