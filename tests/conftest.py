"""What holds for every test: depth of property tests, one thread per worker, a second reader of what is written."""

import os

import hypothesis

# Two workers on two cores: more threads inside each only make both wait. Set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, so that a red build can be repeated; --hypothesis-profile=search looks further.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None, max_examples=100)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("house")

# Everything that a test saves and leaves whole is also read by a reader that knows the specification alone.
pytest_plugins = ["tests.plugins_stranger"]
