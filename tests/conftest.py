"""What holds for every test: the depth of the property tests, and one thread per worker."""

import os

import hypothesis

# Two workers on two cores: more threads inside each only make both wait. Set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a red build can be repeated; --hypothesis-profile=search looks further.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("house")
