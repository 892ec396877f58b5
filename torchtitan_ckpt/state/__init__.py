"""What a training job is made of, as flat state dicts."""
