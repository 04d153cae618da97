if __name__ == "__main__":
    import vitinit.begin  # noqa: F401
    from vitinit.run import main
    raise SystemExit(main(name="vitinit.train"))
