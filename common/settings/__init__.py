"""Every setting once: its declaration, where its value comes from, and checks across sections."""
