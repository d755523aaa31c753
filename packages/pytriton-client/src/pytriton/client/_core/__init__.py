"""What every client needs whatever it speaks: requests, results, options, deadlines, the specification of a model."""
