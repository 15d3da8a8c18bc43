"""The one base of failures that a user can mend: the command line prints them and exits with 2."""


class UserError(ValueError):
    """Its message is one clear sentence that says what to change."""
