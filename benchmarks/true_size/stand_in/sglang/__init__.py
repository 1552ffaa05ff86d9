"""A stand-in for SGLang that answers with real sizes at a modelled speed (`launch_server`)."""
