"""What tests and tools need around engines that are made for GPUs."""
