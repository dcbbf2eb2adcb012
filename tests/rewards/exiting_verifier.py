"""A verifier's module that ends the program that imports it."""

import sys

sys.exit("no verifier today")
