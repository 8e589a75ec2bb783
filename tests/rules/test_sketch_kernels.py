DTYPES = [torch.float32, torch.float64]
