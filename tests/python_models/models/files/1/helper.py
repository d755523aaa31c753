NAME = f"{__name__} of {__package__}"
