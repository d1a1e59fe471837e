//! What the build and the ranks need from the system, and the environment they run in.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, thread};

use crate::Failure;

/// Environment variables for child processes; what the user set stays.
#[derive(Clone, Debug, Default)]
pub struct Environment(Vec<(&'static str, OsString)>);

impl Environment {
    fn set(&mut self, name: &'static str, value: impl Into<OsString>) {
        if env::var_os(name).is_none() {
            self.0.push((name, value.into()));
        }
    }

    /// The environment applied to `command`.
    pub fn apply<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.envs(self.0.iter().map(|(name, value)| (name, value)))
    }

    /// Prints the lines that give a shell the same environment.
    pub fn print(&self) {
        for (name, value) in &self.0 {
            println!("export {name}={}", value.display());
        }
    }
}

/// Something the system has to have, and the packages that bring it.
struct Need {
    what: &'static str,
    there: fn() -> bool,
    debian: &'static [&'static str],
}

const NEEDS: [Need; 5] = [
    Need { what: "a C compiler", there: || runs("cc", "--version"), debian: &["build-essential"] },
    Need { what: "pkg-config", there: || runs("pkg-config", "--version"), debian: &["pkg-config"] },
    Need { what: "MPI (mpicc and mpirun)", there: mpi, debian: &["libopenmpi-dev", "openmpi-bin"] },
    Need { what: "libclang", there: libclang, debian: &["libclang-dev"] },
    Need { what: "HDF5 with headers", there: hdf5, debian: &["libhdf5-dev"] },
];

/// What to do where this program may not install.
const BY_HAND: &str = "\
Install them, then run this command again:
  Debian, Ubuntu   apt-get install build-essential pkg-config libopenmpi-dev openmpi-bin libclang-dev libhdf5-dev
                   (or mpich libmpich-dev in place of libopenmpi-dev openmpi-bin)
  Fedora           dnf install gcc pkgconf-pkg-config openmpi-devel clang-devel hdf5-devel
                   module load mpi/openmpi-x86_64
  conda            conda install -c conda-forge compilers pkg-config openmpi libclang hdf5
                   export LIBCLANG_PATH=$CONDA_PREFIX/lib HDF5_DIR=$CONDA_PREFIX
  pip, without root (for MPI and libclang)
                   pip install mpich libclang
                   export MPICC=$(command -v mpicc)
                   export LIBCLANG_PATH=$(python3 -c 'import clang, os; print(os.path.dirname(clang.__file__) + \"/native\")')
                   export BINDGEN_EXTRA_CLANG_ARGS=-I$(gcc -print-file-name=include)
  HPC site         load the modules of MPI, HDF5 and LLVM; export HDF5_DIR and LIBCLANG_PATH where they are not found";

/// Looks for what is needed, installs what is missing where it may, and returns the environment for children.
pub fn run() -> Result<Environment, Failure> {
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.there)()).collect();
    if !missing.is_empty() {
        let what = missing.iter().map(|need| need.what).collect::<Vec<_>>().join(", ");
        eprintln!("missing: {what}");
        install(&missing)?;
        if let Some(need) = missing.iter().find(|need| !(need.there)()) {
            return Err(format!("{} is still not found after the installation\n{BY_HAND}", need.what).into());
        }
    }
    Ok(environment())
}

/// Installs with apt as root or through a sudo that asks for nothing.
fn install(missing: &[&Need]) -> Result<(), Failure> {
    let root = is_root();
    if !runs("apt-get", "--version") || !(root || succeeds(Command::new("sudo").args(["-n", "true"]))) {
        return Err(format!("this program may not install them here\n{BY_HAND}").into());
    }
    let mut packages: Vec<&str> = missing.iter().flat_map(|need| need.debian).copied().collect();
    // A machine that runs MPICH lacks its headers, not another MPI.
    if output("mpirun", &["--version"]).is_some_and(|text| text.contains("HYDRA")) {
        packages.retain(|package| !package.contains("openmpi"));
        packages.extend(["mpich", "libmpich-dev"]);
    }
    let apt = |arguments: &[&str]| {
        let mut command = if root { Command::new("apt-get") } else { Command::new("sudo") };
        if !root {
            command.args(["-n", "env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        }
        command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments).stdin(Stdio::null());
        eprintln!("apt-get {}", arguments.join(" "));
        command.status()
    };
    // An update that fails leaves older lists, which may do.
    apt(&["-qq", "update"])?;
    let arguments: Vec<&str> = ["-qq", "-y", "--no-install-recommends", "install"].into_iter().chain(packages).collect();
    if !apt(&arguments)?.success() {
        return Err(format!("apt-get could not install them\n{BY_HAND}").into());
    }
    Ok(())
}

fn environment() -> Environment {
    let mut environment = Environment::default();
    if let Some(folder) = hdf5_dir() {
        environment.set("HDF5_DIR", folder);
    }
    if is_root() {
        environment.set("OMPI_ALLOW_RUN_AS_ROOT", "1");
        environment.set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    }
    // More ranks than cores.
    environment.set("OMPI_MCA_rmaps_base_oversubscribe", "1");
    // Open MPI 4 returns wrong data from collective reads otherwise (open-mpi/ompi#10546).
    environment.set("OMPI_MCA_fbtl_posix_read_datasieving", "0");
    // Containers forbid reading another process's memory.
    if ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists()) {
        environment.set("OMPI_MCA_btl_vader_single_copy_mechanism", "none");
    }
    environment
}

/// Threads for each of `ranks` on this machine.
pub fn threads_per_rank(ranks: usize) -> usize {
    (thread::available_parallelism().map_or(1, |n| n.get()) / ranks).max(1)
}

fn is_root() -> bool {
    output("id", &["-u"]).is_some_and(|id| id.trim() == "0")
}

fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn runs(program: &str, argument: &str) -> bool {
    succeeds(Command::new(program).arg(argument))
}

/// What `program` prints, if it can be run.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn mpi() -> bool {
    let compiler = env::var("MPICC").unwrap_or_else(|_| "mpicc".into());
    let root = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"];
    runs(&compiler, "-show") && succeeds(Command::new("mpirun").arg("--version").envs(root.map(|name| (name, "1"))))
}

fn libclang() -> bool {
    let in_folder = |folder: PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name()).any(|name| {
            let name = name.to_string_lossy();
            name.starts_with("libclang") && !name.starts_with("libclang-cpp") && name.contains(".so") || name == "libclang.dylib"
        })
    };
    if let Some(path) = env::var_os("LIBCLANG_PATH") {
        let path = PathBuf::from(path);
        return path.is_file() || in_folder(path);
    }
    let versions = fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let llvm =
        versions.filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("llvm"))).map(|p| p.join("lib"));
    let known = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/opt/llvm/lib"].map(PathBuf::from);
    let configured = output("llvm-config", &["--libdir"]).map(|text| PathBuf::from(text.trim()));
    llvm.chain(known).chain(multiarch().map(|triple| Path::new("/usr/lib").join(triple))).chain(configured).any(in_folder)
}

/// The name of Debian's folder for this architecture.
fn multiarch() -> Option<String> {
    output("cc", &["-print-multiarch"]).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn hdf5() -> bool {
    let header = ["/usr/include/hdf5/serial/hdf5.h", "/usr/include/hdf5.h", "/usr/local/include/hdf5.h"];
    let given = env::var_os("HDF5_DIR").is_some_and(|folder| Path::new(&folder).join("include/hdf5.h").exists());
    given || pkg_config_hdf5().is_some() || header.iter().any(|path| Path::new(path).exists())
}

/// The linker flags of the HDF5 that pkg-config knows.
fn pkg_config_hdf5() -> Option<String> {
    output("pkg-config", &["--libs", "hdf5"])
}

/// Debian's serial HDF5, where the build would not find it by itself: pkg-config may know none, or name a parallel one.
fn hdf5_dir() -> Option<PathBuf> {
    if pkg_config_hdf5().is_some_and(|flags| !flags.contains("mpi")) {
        return None;
    }
    let folder = Path::new("/usr/lib").join(multiarch()?).join("hdf5/serial");
    folder.join("include").exists().then_some(folder)
}
