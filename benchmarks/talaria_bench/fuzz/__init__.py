"""Coverage-guided fuzzing of every decoder that a stranger's bytes can reach; needs atheris (``pip install
'talaria[fuzz]'``)."""
