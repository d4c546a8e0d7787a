"""Small networks for the tests, one for each way in which channels can be coupled. ``cases.py`` lists them."""
