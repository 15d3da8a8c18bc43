"""The tests on every supported Python: `nox`, or one of them: `nox -s tests-3.12`."""

import nox


@nox.session(python=["3.11", "3.12"])
def tests(session: nox.Session) -> None:
    session.install("-e", ".[test]")
    # Python 3.11 has jax 0.10 as its newest; 3.12 gets the newest that the bounds allow.
    session.run("python", "-c", "import jax, sys; print(sys.version, jax.__version__)")
    session.run("python", "-m", "pytest", *session.posargs)
