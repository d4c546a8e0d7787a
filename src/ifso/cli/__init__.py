"""The command line: thin modules that parse, call the API and print. Nothing here imports torch before it must."""
