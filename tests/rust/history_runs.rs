//! Runs of histories: from a seed, and from everything that a fuzzer has found.
//!
//! A failing history is saved in `tests/fuzz/artifacts`, as `make fuzz` saves its findings.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::histories::{ALL, run};

/// The folder of a fuzz target's files of one kind.
fn folder(kind: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz").join(kind).join(name)
}

/// Pseudo-random numbers, determined by the seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self) -> Vec<u8> {
        let words = 16 + self.next() % 496;
        (0..words).flat_map(|_| self.next().to_le_bytes()).collect()
    }
}

/// Saves the bytes of a failing history.
struct SaveOnFailure<'a> {
    name: &'a str,
    seed: u64,
    number: u64,
    bytes: &'a [u8],
}

impl Drop for SaveOnFailure<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { name, seed, number, bytes } = self;
            let path = folder("artifacts", name).join(format!("seed-{seed}-{number}"));
            let kept = fs::create_dir_all(folder("artifacts", name)).and_then(|()| fs::write(&path, bytes));
            let _ = writeln!(
                std::io::stderr(),
                "{name} history {number} of seed {seed} has failed: {} ({kept:?})",
                path.display()
            );
        }
    }
}

/// Runs histories of one kind until they have taken enough steps; returns the number of histories and of
/// steps.
fn run_seeded(name: &str, seed: u64, steps: usize) -> (u64, usize) {
    let of_name = name.bytes().fold(seed, |hash, byte| Random(hash ^ u64::from(byte)).next());
    let (mut histories, mut done) = (0, 0);
    while done < steps {
        let bytes = Random(of_name.wrapping_add(histories)).bytes();
        let _kept = SaveOnFailure { name, seed, number: histories, bytes: &bytes };
        done += run(name, &bytes);
        histories += 1;
    }
    (histories, done)
}

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

#[test]
fn short_histories_agree_with_their_models() {
    /// Steps of each kind: some seconds in all, without optimisation.
    const STEPS: usize = 8_000;
    std::thread::scope(|scope| {
        for (name, _) in ALL {
            scope.spawn(move || run_seeded(name, setting("KVPOOL_HISTORY_SEED", 1), STEPS));
        }
    });
}

/// `KVPOOL_HISTORY_STEPS` steps in all, the same number of each kind, from `KVPOOL_HISTORY_SEED`; of the kinds that
/// `KVPOOL_HISTORY` lists, or of all.
#[test]
#[ignore = "takes minutes: run by `make histories`"]
fn long_histories_agree_with_their_models() {
    let (steps, seed) = (setting("KVPOOL_HISTORY_STEPS", 11_000_000), setting("KVPOOL_HISTORY_SEED", 1));
    let chosen = std::env::var("KVPOOL_HISTORY").unwrap_or_default();
    let mut names: Vec<&str> = chosen.split_whitespace().collect();
    if names.is_empty() {
        names.extend(ALL.iter().map(|(name, _)| name));
    }
    let part = usize::try_from(steps).expect("a size").div_ceil(names.len());
    let mut out = std::io::stdout();
    let mut tell = |what: &str, histories, steps, begin: Instant| {
        let (seconds, steps) = (begin.elapsed().as_secs_f64(), u32::try_from(steps).unwrap_or(u32::MAX));
        let rate = f64::from(steps) / seconds;
        writeln!(
            out,
            "{what:>8} {histories:>8} histories {steps:>10} steps {seconds:>7.1} s {rate:>9.0} steps/s"
        )
        .expect("stdout is open");
    };
    let (begin, mut all) = (Instant::now(), (0, 0));
    for name in names {
        let begin = Instant::now();
        let (histories, steps) = run_seeded(name, seed, part);
        tell(name, histories, steps, begin);
        all = (all.0 + histories, all.1 + steps);
    }
    tell("all", all.0, all.1, begin);
}

/// The files of a folder; none if it does not exist.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    paths
}

/// Runs all findings, and the seeds of each fuzz target until they have made 100 steps.
#[test]
fn fuzzer_findings_agree_with_models() {
    let steps = |name, path: PathBuf| run(name, &fs::read(path).expect("a file"));
    let mut findings = 0;
    for (name, _) in ALL {
        for path in files(&folder("findings", name)) {
            assert!(steps(name, path) > 0, "a finding of {name} has no steps");
            findings += 1;
        }
        let (mut of_seeds, mut seeds) = (0, files(&folder("corpus", name)).into_iter());
        while of_seeds <= 100 {
            let seed = seeds.next().unwrap_or_else(|| panic!("the seeds of {name} have {of_seeds} steps"));
            of_seeds += steps(name, seed);
        }
    }
    assert!(findings > 0, "there are no findings");
}

#[test]
fn every_folder_belongs_to_a_history() {
    for kind in ["corpus", "findings"] {
        for path in files(&folder(kind, "")) {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            // Some targets are written in Python, and tested there.
            let is_python = folder("", &format!("{name}.py")).is_file();
            let is_known = is_python || ALL.iter().any(|(known, _)| *known == name);
            assert!(is_known, "{} belongs to no history", path.display());
        }
    }
}
