"""snapd beside the real engines. Every adapter imports its engine lazily; nothing else imports an adapter."""
