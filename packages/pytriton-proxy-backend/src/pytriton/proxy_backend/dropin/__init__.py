"""Drop-in models: models of ours in the model repository of somebody else's tritonserver."""
