"""Messages to token ids: chat templates in a sandbox of their own, and text that can not forge
control ids."""
