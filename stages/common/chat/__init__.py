"""Messages to token ids: chat templates in a sandbox of their own, and text that cannot forge
control ids."""
