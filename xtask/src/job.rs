//! Child processes that are watched: their output is shown and kept, and they end in time.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::Failure;
use crate::setup::{Environment, threads_per_rank};

/// What became of a job.
#[derive(Debug)]
pub struct Outcome {
    /// How it ended; `None` when it was killed for taking too long.
    pub status: Option<ExitStatus>,
    /// What it wrote to stdout.
    pub stdout: Vec<String>,
    /// What it wrote to stderr.
    pub stderr: Vec<String>,
    /// How long it took.
    pub elapsed: Duration,
}

impl Outcome {
    /// Whether it ended by itself, without an error.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// `program` on `ranks` ranks under mpirun.
pub fn mpirun(environment: &Environment, ranks: usize, program: &Path) -> Command {
    let mut command = Command::new("mpirun");
    environment.apply(&mut command);
    command.arg("-n").arg(ranks.to_string()).arg(program).env("RAYON_NUM_THREADS", threads_per_rank(ranks).to_string());
    command
}

/// What to do with a line of a job's output as it comes.
#[derive(Clone, Copy, PartialEq)]
pub enum Show {
    /// Print all lines.
    All,
    /// Print none.
    Nothing,
}

/// Runs `command` to its end, or for `limit`, and kills it then with all it started.
pub fn run(command: &mut Command, limit: Duration, show: Show) -> Result<Outcome, Failure> {
    let start = Instant::now();
    let name = command.get_program().display().to_string();
    // A group of its own, so that the ranks die with mpirun.
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).spawn();
    let mut child = child.map_err(|error| format!("{name} cannot be started: {error}"))?;
    let stdout = lines(child.stdout.take().expect("piped"), move |line| {
        if show == Show::All {
            println!("{line}");
        }
    });
    let stderr = lines(child.stderr.take().expect("piped"), move |line| {
        if show == Show::All {
            eprintln!("{line}");
        }
    });
    let mut pause = Duration::from_millis(1);
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if start.elapsed() > limit => {
                let group = format!("-{}", child.id());
                // Ranks that mpirun started are in groups of their own: it passes a TERM on to them.
                let kill = |signal: &str| Command::new("kill").args([signal, "--", &group]).status();
                kill("-TERM")?;
                thread::sleep(Duration::from_secs(2));
                kill("-KILL")?;
                child.wait()?;
                break None;
            }
            None => thread::sleep(pause),
        }
        pause = (pause * 2).min(Duration::from_millis(50));
    };
    let elapsed = start.elapsed();
    // A rank that outlives mpirun would keep the pipes open: its lines are not waited for.
    let rest = |receiver: mpsc::Receiver<String>| {
        let mut lines = Vec::new();
        while let Ok(line) = receiver.recv_timeout(Duration::from_secs(2)) {
            lines.push(line);
        }
        lines
    };
    Ok(Outcome { status, stdout: rest(stdout), stderr: rest(stderr), elapsed })
}

/// Reads lines as they come, on a thread.
fn lines(stream: impl Read + Send + 'static, each: impl Fn(&str) + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            each(&line);
            if sender.send(line).is_err() {
                break;
            }
            bytes.clear();
        }
    });
    receiver
}
