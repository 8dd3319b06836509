def training_flops(*a):
    return None


def peak_flops():
    return None
