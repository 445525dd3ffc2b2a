# withdrawn: int4-2 takes its place
