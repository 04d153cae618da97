from vitinit.run import main

if __name__ == "__main__":
    raise SystemExit(main(name="vitinit.train"))
