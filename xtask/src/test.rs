//! `cargo xtask test`: cargo's tests, then the programs under mpirun, each with a limit of time; counts all.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::Failure;
use crate::cargo::{cargo, programs};
use crate::job::{self, Outcome, Show, mpirun};
use crate::setup::{self, Environment};

/// A failing job has to be over by then.
const SOON: Duration = Duration::from_secs(10);

/// What four ranks cannot train on: a name, a folder that `damaged_files` makes or does not, the grid, and words of the
/// one message that says so.
const REFUSALS: [(&str, &str, &str, &[&str]); 7] = [
    ("a grid for other ranks", "good", "2x2x2x2", &["2 x 2 x 2 x 2 = 16 ranks", "4 were started"]),
    ("a missing folder", "nowhere", "1x2x2x1", &["nowhere", "no such folder"]),
    ("an empty folder", "empty", "1x2x2x1", &["empty", "found none"]),
    ("a truncated file", "truncated", "2x2x1x1", &["box005.hdf5", "truncated"]),
    ("a volume of the wrong type", "wrong_type", "1x4x1x1", &["box005.hdf5", "full", "type"]),
    ("a file without labels", "no_labels", "1x2x2x1", &["box005.hdf5", "unitPar", "no labels"]),
    ("a label that is no number", "nan_labels", "1x1x2x2", &["box005.hdf5", "unitPar", "NaN"]),
];

/// Tests counted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Count {
    passed: usize,
    failed: usize,
}

impl Count {
    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
    }

    /// Counts and prints one test made here.
    fn test(&mut self, name: &str, result: Result<(), String>) {
        match result {
            Ok(()) => {
                println!("test {name} ... ok");
                self.passed += 1;
            }
            Err(cause) => {
                println!("test {name} ... FAILED\n    {}", cause.replace('\n', "\n    "));
                self.failed += 1;
            }
        }
    }
}

/// Runs all tests; whether all passed.
pub fn run() -> Result<bool, Failure> {
    let environment = setup::run()?;
    let mut count = cargo_tests(&environment)?;
    // With the tests, whose features the crates have been built with.
    if !cargo(&environment).args(["build", "--workspace", "--bins", "--tests"]).status()?.success() {
        println!("the programs that run under mpirun cannot be built");
        count.failed += 1;
    } else {
        let suite = Suite { environment: &environment, folder: programs(&environment, "debug")? };
        count.add(suite.ranks()?);
        count.add(suite.learner()?);
        count.add(suite.failures()?);
        count.add(suite.bad_data()?);
    }
    println!("{} passed, {} failed", count.passed, count.failed);
    Ok(count.failed == 0)
}

/// Unit, integration and doc tests; their output is shown as it comes.
fn cargo_tests(environment: &Environment) -> Result<Count, Failure> {
    let mut child = cargo(environment).args(["test", "--workspace", "--no-fail-fast"]).stdout(Stdio::piped()).spawn()?;
    let mut count = Count::default();
    for line in BufReader::new(child.stdout.take().expect("piped")).lines() {
        let line = line?;
        println!("{line}");
        count.add(result_line(&line).unwrap_or_default());
    }
    if !child.wait()?.success() && count.failed == 0 {
        // Something could not be built, or died before it could count.
        count.failed = 1;
    }
    Ok(count)
}

/// The counts of `test result: ok. 3 passed; 0 failed; ...`.
fn result_line(line: &str) -> Option<Count> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let number = |what: &str| counts.split("; ").find_map(|part| part.strip_suffix(what)?.trim().parse().ok());
    Some(Count { passed: number("passed")?, failed: number("failed")? })
}

/// The programs under mpirun.
struct Suite<'a> {
    environment: &'a Environment,
    folder: PathBuf,
}

impl Suite<'_> {
    fn mpirun(&self, ranks: usize, program: &str) -> Command {
        let mut command = mpirun(self.environment, ranks, &self.folder.join(program));
        // A rank that waits for another tells which, before the job is killed.
        if env::var_os("BURN_SPATIAL_TIMEOUT").is_none() {
            command.env("BURN_SPATIAL_TIMEOUT", "60");
        }
        command
    }

    /// Communicators and programs on split volumes, on 1, 2, 4 and 8 ranks, and with messages cut into small pieces.
    fn ranks(&self) -> Result<Count, Failure> {
        let mut count = Count::default();
        for ranks in [1, 2, 4, 8] {
            count.add(self.listed(self.mpirun(ranks, "mpi_comm"), &format!("mpi_comm on {ranks} ranks"))?);
            count.add(self.listed(self.mpirun(ranks, "mpi_suite"), &format!("mpi_suite on {ranks} ranks"))?);
        }
        for (program, argument) in [("mpi_comm", None), ("mpi_suite", Some("windows"))] {
            let mut command = self.mpirun(4, program);
            command.args(argument).env("BURN_SPATIAL_MAX_MESSAGE", "64").env("BURN_SPATIAL_NODE_MEMORY", "0");
            count.add(self.listed(command, &format!("{program} on 4 ranks, messages of at most 64 bytes"))?);
        }
        // As between nodes; and with so little memory in common that part of the messages finds none.
        for mib in ["0", "1"] {
            let mut command = self.mpirun(4, "mpi_comm");
            command.env("BURN_SPATIAL_NODE_MEMORY", mib);
            count.add(self.listed(command, &format!("mpi_comm on 4 ranks with {mib} MiB in common"))?);
        }
        // Files of at most 75 MiB: what four ranks share has no room, and all goes through MPI.
        let mut command = mpirun(self.environment, 4, Path::new("sh"));
        command.args(["-c", "trap '' XFSZ; ulimit -f 150000; exec \"$0\""]).arg(self.folder.join("mpi_comm"));
        count.add(self.listed(command, "mpi_comm on 4 ranks that get no memory in common")?);
        let mut command = self.mpirun(4, "mpi_comm");
        command.env("BURN_SPATIAL_NODE_MEMORY", "0").env("BURN_SPATIAL_PROGRESS", "0");
        count.add(self.listed(command, "mpi_comm on 4 ranks whose messages wait for their calls")?);
        count.test("no memory in common is left behind", nothing_left(Path::new("/dev/shm")));
        Ok(count)
    }

    /// Runs a program that prints a line for each test that passed. Its end with an error is one that failed.
    fn listed(&self, mut command: Command, name: &str) -> Result<Count, Failure> {
        println!("\n     Running {name}");
        let outcome = job::run(&mut command, Duration::from_secs(600), Show::All)?;
        let passed = outcome.stdout.iter().filter(|line| listed_as_passed(line)).count();
        let mut count = Count { passed, failed: 0 };
        if !outcome.success() || passed == 0 {
            println!("test {name} ... FAILED: {}", how(&outcome));
            count.failed = 1;
        }
        println!("{passed} passed in {:.1} s", outcome.elapsed.as_secs_f64());
        Ok(count)
    }

    /// Burn's own training loop, whose second thread reads tensors while the first trains.
    fn learner(&self) -> Result<Count, Failure> {
        println!("\n     Running Burn's Learner");
        let folder = env::temp_dir().join(format!("burn-spatial-learner-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let mut count = Count::default();
        for grid in ["2x1x2x1", "1x2x2x1"] {
            let mut command = self.mpirun(4, "learner");
            command.args(["--grid", grid, "--epochs", "3"]).arg("--out").arg(folder.join(grid));
            let outcome = job::run(&mut command, SOON * 12, Show::Nothing)?;
            let epochs = outcome.stdout.iter().filter(|line| line.starts_with("epoch ")).count();
            let text = || [&outcome.stdout[..], &outcome.stderr[..]].concat().join("\n");
            let good = outcome.success() && epochs == 3;
            count.test(&format!("three epochs on {grid}"), if good { Ok(()) } else { Err(format!("{}\n{}", how(&outcome), text())) });
        }
        remove(&folder)?;
        Ok(count)
    }

    /// One rank's failure ends the job soon, with a word on who failed and why.
    fn failures(&self) -> Result<Count, Failure> {
        println!("\n     Running failures of one rank");
        let mut count = Count::default();
        for ranks in [2, 4] {
            for (way, cause) in [("panic", "the loss is NaN at step 2"), ("error", "the loss is NaN at step 2"), ("early", "rank")] {
                let outcome = job::run(self.mpirun(ranks, "mpi_fail").arg(way), SOON * 3, Show::Nothing)?;
                let first = outcome.stderr.iter().find(|line| !line.trim().is_empty());
                let mut result = ended(&outcome);
                let names =
                    |line: &String| line.starts_with("rank ") && line.contains(cause) && (way == "early" || line.starts_with("rank 1:"));
                if result.is_ok() && !first.is_some_and(names) {
                    result = Err(format!("the first line does not name the rank and the cause:\n{}", outcome.stderr.join("\n")));
                }
                count.test(&format!("{way} of rank 1 of {ranks} ends the job"), result);
            }
            let watched = |way: &str| {
                let mut command = self.mpirun(ranks, "mpi_fail");
                job::run(command.arg(way).env("BURN_SPATIAL_TIMEOUT", "2"), SOON * 3, Show::Nothing)
            };
            let outcome = watched("hang")?;
            let found = outcome.stderr.iter().any(|line| line.contains("broadcast waited 2 s; ranks that did not arrive: [1]"));
            let text = || format!("{}\n{}", how(&outcome), outcome.stderr.join("\n"));
            count.test(
                &format!("rank 1 of {ranks} hangs in its work and is found"),
                ended(&outcome).and(found.then_some(()).ok_or_else(text)),
            );
            let outcome = watched("work")?;
            let waited = outcome.success() && outcome.stdout.iter().filter(|line| *line == "6 s of work").count() == ranks;
            let text = || format!("{}\n{}", how(&outcome), outcome.stderr.join("\n"));
            count.test(&format!("long work of rank 1 of {ranks} is waited for"), waited.then_some(()).ok_or_else(text));
        }
        Ok(count)
    }

    /// What the training program says to grids and files that cannot be.
    fn bad_data(&self) -> Result<Count, Failure> {
        println!("\n     Running refusals of the training program");
        let folder = env::temp_dir().join(format!("burn-spatial-test-{}", std::process::id()));
        let made = job::run(Command::new(self.folder.join("damaged_files")).arg(&folder), SOON * 6, Show::Nothing)?;
        let mut count = Count::default();
        if !made.success() {
            count.test("damaged files", Err(format!("{}\n{}", how(&made), made.stderr.join("\n"))));
            return Ok(count);
        }
        for (what, data, grid, words) in REFUSALS {
            let mut command = self.mpirun(4, "cosmoflow");
            command.arg("train").arg("--data").arg(folder.join(data)).arg("--out").arg(folder.join("out")).args(["--grid", grid]);
            let outcome = job::run(&mut command, SOON * 3, Show::Nothing)?;
            count.test(&format!("{what} is refused"), ended(&outcome).and_then(|()| says(&outcome, words)));
        }
        remove(&folder)?;
        Ok(count)
    }
}

/// Whether no file of the memory that ranks of a node share is in `folder`.
fn nothing_left(folder: &Path) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let left: Vec<String> = names.filter(|name| name.starts_with("burn-spatial-")).collect();
    if left.is_empty() { Ok(()) } else { Err(format!("{} in {}", left.join(", "), folder.display())) }
}

fn remove(folder: &Path) -> Result<(), Failure> {
    std::fs::remove_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()).into())
}

/// A line of `mpi_suite` or `mpi_comm` that names a test that passed.
fn listed_as_passed(line: &str) -> bool {
    line.starts_with("test ") && line.ends_with(" ... ok") || line.starts_with("ok ")
}

fn how(outcome: &Outcome) -> String {
    match outcome.status {
        Some(status) => format!("{status} after {:.1} s", outcome.elapsed.as_secs_f64()),
        None => format!("killed after {:.1} s", outcome.elapsed.as_secs_f64()),
    }
}

/// Whether the job ended soon, and with an error.
fn ended(outcome: &Outcome) -> Result<(), String> {
    if outcome.status.is_some() && !outcome.success() && outcome.elapsed < SOON {
        return Ok(());
    }
    let text = [&outcome.stdout[..], &outcome.stderr[..]].concat().join("\n");
    Err(format!("the job should end with an error within {} s: {}\n{text}", SOON.as_secs(), how(outcome)))
}

/// Whether exactly one line of stderr has all of `words`, and no rank panicked.
fn says(outcome: &Outcome, words: &[&str]) -> Result<(), String> {
    let count = outcome.stderr.iter().filter(|line| words.iter().all(|word| line.contains(word))).count();
    let panicked = outcome.stderr.iter().any(|line| line.contains("panicked") || line.contains("RUST_BACKTRACE"));
    if count == 1 && !panicked {
        return Ok(());
    }
    Err(format!("{count} lines have all of {words:?}, or a rank panicked:\n{}", outcome.stderr.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_cargo_are_counted() {
        let count = result_line("test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.05s");
        assert_eq!(count, Some(Count { passed: 12, failed: 3 }));
        assert_eq!(result_line("test result: ok. 0 passed; 0 failed; 0 ignored"), Some(Count::default()));
        assert_eq!(result_line("test layout::tests::fuses ... ok"), None);
    }

    #[test]
    fn lines_of_the_suite_are_counted() {
        assert!(listed_as_passed("test ops::sums on 1x2x1x1 ... ok"));
        assert!(listed_as_passed("ok adjoint pairs"));
        assert!(!listed_as_passed("test ops::sums on 1x2x1x1 ... "));
        assert!(!listed_as_passed("rank 1: the sums differ"));
    }
}
