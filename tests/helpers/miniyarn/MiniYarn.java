// A stand-in for YARN: a ResourceManager and NodeManagers in one process, on the loopback, without security. They speak
// Hadoop's own protocols, so that the real clients (skein, Spark) run on it unmodified, and are made of nothing but the
// hadoop-client jars that come with pyspark. Nodes have labels and limits; containers are local processes.
//
// It is not YARN: no queues, no preemption, no killing for memory, no Kerberos, one attempt for each application.
//
// java MiniYarn FOLDER JARS LABEL,LABEL,... [MEMORY_MB VCORES]
//     FOLDER gets conf/ (to be HADOOP_CONF_DIR), fs/ (the file system), logs/ and what containers run in.
//     JARS is the class path for application masters; there is one node for each label ("" for a plain one).
//     It prints "READY" once it listens, and ends with its standard input.

import java.io.ByteArrayInputStream;
import java.io.DataInputStream;
import java.io.File;
import java.io.IOException;
import java.lang.reflect.Proxy;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.*;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.ipc.Server;
import org.apache.hadoop.net.NetUtils;
import org.apache.hadoop.security.UserGroupInformation;
import org.apache.hadoop.yarn.api.*;
import org.apache.hadoop.yarn.api.protocolrecords.*;
import org.apache.hadoop.yarn.api.records.*;
import org.apache.hadoop.yarn.api.records.Container;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.exceptions.ApplicationNotFoundException;
import org.apache.hadoop.yarn.exceptions.YarnException;
import org.apache.hadoop.yarn.ipc.YarnRPC;
import org.apache.hadoop.yarn.proto.YarnServiceProtos.SchedulerResourceTypes;
import org.apache.hadoop.yarn.security.ContainerTokenIdentifier;
import org.apache.hadoop.yarn.security.NMTokenIdentifier;
import org.apache.hadoop.yarn.util.Records;

public class MiniYarn {
  static final String HOST = "127.0.0.1";
  static final long START = System.currentTimeMillis();
  static final long GRACE = 3000; // milliseconds between SIGTERM and SIGKILL
  static final Set<String> INHERITED = Set.of("PATH", "LANG", "LC_ALL", "JAVA_TOOL_OPTIONS", "DPS_TEST_RUN");

  static final Map<ApplicationId, App> apps = new ConcurrentHashMap<>();
  static final Map<String, App> masters = new ConcurrentHashMap<>(); // by the id of their RPC client
  static final Map<ContainerId, Running> containers = new ConcurrentHashMap<>();
  static final List<Node> nodes = new ArrayList<>();
  static Configuration conf;
  static YarnRPC rpc;
  static File base;
  static String jars;
  static int lastApp = 0;

  // -- what there is

  static class Node {
    NodeId id;
    String label, http;
    long memoryLimit, memory;
    int vcoresLimit, vcores;

    synchronized boolean fits(Resource r) {
      return memory + r.getMemorySize() <= memoryLimit && vcores + r.getVirtualCores() <= vcoresLimit;
    }

    synchronized void take(Resource r, int sign) {
      memory += sign * r.getMemorySize();
      vcores += sign * r.getVirtualCores();
    }
  }

  static class Running {
    Process process;
    Integer exit;
    volatile boolean killed, gone;
  }

  static class Ask {
    ResourceRequest request;
    int missing;
  }

  static class App {
    ApplicationId id;
    ApplicationSubmissionContext context;
    String user, host = "N/A", url = "N/A", diagnostics = "";
    YarnApplicationState state = YarnApplicationState.NEW;
    FinalApplicationStatus status = FinalApplicationStatus.UNDEFINED;
    int port = -1, lastContainer = 1;
    long start = System.currentTimeMillis();
    volatile long end = 0;
    float progress;
    final Map<String, Ask> asks = new LinkedHashMap<>();
    final Map<ContainerId, Container> running = new ConcurrentHashMap<>();
    final List<ContainerStatus> done = new ArrayList<>();

    ApplicationAttemptId attempt() {
      return ApplicationAttemptId.newInstance(id, 1);
    }

    ContainerId master() {
      return ContainerId.newContainerId(attempt(), 1);
    }

    boolean over() {
      return end != 0;
    }

    void end(YarnApplicationState how, FinalApplicationStatus what) {
      state = how;
      status = what;
      end = System.currentTimeMillis();
      log("APP " + id + " " + state + " " + status + " " + diagnostics);
    }
  }

  // -- protocols: one function for each method

  interface Method {
    Object call(Object[] args) throws Throwable;
  }

  static InetSocketAddress serve(Class<?> protocol, Map<String, Method> methods) {
    Class<?>[] interfaces = {protocol};
    Object implementation = Proxy.newProxyInstance(protocol.getClassLoader(), interfaces, (self, m, args) -> {
      Method method = methods.get(m.getName());
      if (method == null) {
        if (m.getDeclaringClass() == Object.class) {
          switch (m.getName()) {
            case "hashCode": return System.identityHashCode(self);
            case "equals": return self == args[0];
            default: return protocol.getSimpleName();
          }
        }
        throw new YarnException("not in MiniYarn: " + m.getName());
      }
      try {
        return method.call(args);
      } catch (Throwable error) {
        error.printStackTrace();
        throw error;
      }
    });
    Server server = rpc.getServer(protocol, implementation, new InetSocketAddress(HOST, 0), conf, null, 4);
    server.start();
    return NetUtils.getConnectAddress(server);
  }

  static void log(String line) {
    System.out.println(System.currentTimeMillis() - START + " " + line);
    System.out.flush();
  }

  static byte[] bytes(ByteBuffer buffer) {
    byte[] all = new byte[buffer.remaining()];
    buffer.duplicate().get(all);
    return all;
  }

  // -- containers

  static void launch(App app, Node node, ContainerId id, ContainerLaunchContext context, Resource resource)
      throws Exception {
    File folder = new File(base, "usercache/" + app.id + "/" + id);
    File logs = new File(base, "logs/" + app.id + "/" + id);
    folder.mkdirs();
    logs.mkdirs();
    for (Map.Entry<String, LocalResource> entry : context.getLocalResources().entrySet())
      localize(entry.getValue(), new File(folder, entry.getKey()), id + "-" + entry.getKey().replace('/', '_'));
    if (context.getTokens() != null)
      Files.write(new File(folder, "container_tokens").toPath(), bytes(context.getTokens()));

    Map<String, String> env = new LinkedHashMap<>();
    env.put("HADOOP_CONF_DIR", new File(base, "conf").getPath());
    env.put("JAVA_HOME", System.getProperty("java.home"));
    env.put("CONTAINER_ID", id.toString());
    env.put("LOCAL_DIRS", folder.getParent());
    env.put("LOG_DIRS", logs.getPath());
    env.put("PWD", folder.getPath());
    env.put("NM_HOST", node.id.getHost());
    env.put("NM_PORT", "" + node.id.getPort());
    env.put("NM_HTTP_PORT", "8042");
    env.put("USER", app.user);
    env.put("LOGNAME", app.user);
    env.put("HOME", "/home/");
    env.put("HADOOP_TOKEN_FILE_LOCATION", folder.getPath() + "/container_tokens");
    env.putAll(context.getEnvironment());
    StringBuilder script = new StringBuilder("#!/bin/bash\nset -o pipefail\n");
    env.forEach((name, value) -> {
      String quoted = expand(value, logs).replace("\"", "\\\"");
      script.append("export ").append(name).append("=\"").append(quoted).append("\"\n");
    });
    String command = expand(String.join(" ", context.getCommands()), logs).replace("'", "'\\''");
    script.append("exec setsid -w bash -c '").append(command).append("'\n");
    Path file = new File(folder, "launch_container.sh").toPath();
    Files.writeString(file, script.toString());

    ProcessBuilder builder = new ProcessBuilder("bash", file.toString()).directory(folder).redirectErrorStream(true);
    builder.environment().keySet().retainAll(INHERITED);
    builder.redirectOutput(new File(logs, "prelaunch.out"));
    Running running = new Running();
    running.process = builder.start();
    containers.put(id, running);
    node.take(resource, 1);
    log("LAUNCH " + id + " on " + node.id + " '" + node.label + "' " + resource + " pid " + running.process.pid());
    Thread thread = new Thread(() -> await(app, node, id, running, resource));
    thread.setDaemon(true);
    thread.start();
    boolean wanted = id.equals(app.master()) || app.running.containsKey(id);
    if (app.over() || !wanted) kill(id); // meanwhile: whoever killed it did not find it yet
  }

  static void localize(LocalResource resource, File to, String name) throws Exception {
    org.apache.hadoop.fs.Path from = resource.getResource().toPath();
    File copy = new File(base, "filecache/" + name + "-" + from.getName());
    copy.getParentFile().mkdirs();
    from.getFileSystem(conf).copyToLocalFile(false, from, new org.apache.hadoop.fs.Path(copy.getPath()), true);
    to.getParentFile().mkdirs();
    if (resource.getType() != LocalResourceType.ARCHIVE) {
      Files.copy(copy.toPath(), to.toPath(), StandardCopyOption.REPLACE_EXISTING);
      return;
    }
    to.mkdirs();
    String[] unpack = from.getName().endsWith(".zip")
        ? new String[] {"unzip", "-qo", copy.getPath(), "-d", to.getPath()}
        : new String[] {"tar", "xf", copy.getPath(), "-C", to.getPath()};
    new ProcessBuilder(unpack).inheritIO().start().waitFor();
  }

  static String expand(String text, File logs) {
    text = text.replace("<LOG_DIR>", logs.getPath()).replace("<CPS>", ":");
    return text.replaceAll("\\{\\{([A-Za-z_0-9]+)\\}\\}", "\\${$1}");
  }

  static void await(App app, Node node, ContainerId id, Running running, Resource resource) {
    try {
      running.exit = running.process.waitFor();
    } catch (InterruptedException error) {
      return;
    }
    if (!running.killed) signal("KILL", running); // what it has left behind
    node.take(resource, -1);
    log("EXIT " + id + " code " + running.exit + (running.killed ? " (killed)" : ""));
    if (id.equals(app.master())) {
      if (!app.over()) {
        app.diagnostics += " the application master exited with " + running.exit;
        app.end(YarnApplicationState.FAILED, FinalApplicationStatus.FAILED);
      }
      app.running.keySet().forEach(MiniYarn::kill);
      return;
    }
    app.running.remove(id);
    int code = running.killed ? ContainerExitStatus.KILLED_BY_APPMASTER : running.exit;
    String why = code == 0 ? "" : "Container exited with a non-zero exit code " + running.exit;
    synchronized (app.done) {
      app.done.add(ContainerStatus.newInstance(id, ContainerState.COMPLETE, why, code));
    }
  }

  static void kill(ContainerId id) {
    Running running = containers.get(id);
    if (running == null || running.exit != null) return;
    running.killed = true;
    signal("TERM", running);
    new Timer(true).schedule(new TimerTask() {
      public void run() {
        signal("KILL", running);
      }
    }, GRACE);
  }

  // The container's processes are a session and its group; at first, there is only the one that will lead it. A list of
  // descendants would miss what is forked while it is made.
  static void signal(String name, Running running) {
    running.gone = name.equals("KILL");
    String pid = "" + running.process.pid();
    try {
      ProcessBuilder kill = new ProcessBuilder("bash", "-c", "kill -$0 -- -$1 $1", name, pid);
      kill.redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.DISCARD).start().waitFor();
    } catch (IOException | InterruptedException error) {
      error.printStackTrace();
    }
  }

  static Map<String, Method> nodeMethods(Node node) {
    Map<String, Method> methods = new HashMap<>();
    methods.put("startContainers", args -> {
      List<ContainerId> started = new ArrayList<>();
      Map<ContainerId, SerializedException> failed = new HashMap<>();
      for (StartContainerRequest request : ((StartContainersRequest) args[0]).getStartContainerRequests()) {
        ContainerTokenIdentifier token = new ContainerTokenIdentifier();
        byte[] about = bytes(request.getContainerToken().getIdentifier());
        token.readFields(new DataInputStream(new ByteArrayInputStream(about)));
        ContainerId id = token.getContainerID();
        try {
          App app = apps.get(id.getApplicationAttemptId().getApplicationId());
          launch(app, node, id, request.getContainerLaunchContext(), token.getResource());
          started.add(id);
        } catch (Exception error) {
          error.printStackTrace();
          failed.put(id, SerializedException.newInstance(error));
        }
      }
      return StartContainersResponse.newInstance(new HashMap<>(), started, failed);
    });
    methods.put("stopContainers", args -> {
      List<ContainerId> ids = ((StopContainersRequest) args[0]).getContainerIds();
      ids.forEach(MiniYarn::kill);
      return StopContainersResponse.newInstance(new ArrayList<>(ids), new HashMap<>());
    });
    methods.put("getContainerStatuses", args -> {
      List<ContainerStatus> found = new ArrayList<>();
      for (ContainerId id : ((GetContainerStatusesRequest) args[0]).getContainerIds()) {
        Running running = containers.get(id);
        boolean over = running == null || running.exit != null;
        int code = running == null || running.exit == null ? ContainerExitStatus.INVALID : running.exit;
        found.add(ContainerStatus.newInstance(id, over ? ContainerState.COMPLETE : ContainerState.RUNNING, "", code));
      }
      return GetContainerStatusesResponse.newInstance(found, new HashMap<>());
    });
    return methods;
  }

  // -- application masters

  /** Whose master it is that calls: the oldest application that waits for one, when it registers. */
  static App caller(boolean registers) throws IOException {
    String client = Arrays.toString(Server.getClientId());
    synchronized (masters) {
      App app = masters.get(client);
      if (app == null && registers) {
        Comparator<App> byAge = Comparator.comparing(a -> a.id);
        app = apps.values().stream().filter(a -> a.state == YarnApplicationState.ACCEPTED)
            .filter(a -> !masters.containsValue(a)).min(byAge).orElse(null);
        if (app != null) masters.put(client, app);
      }
      if (app == null) throw new IOException("unknown application master");
      return app;
    }
  }

  static RegisterApplicationMasterResponse register(App app, RegisterApplicationMasterRequest request) {
    app.host = request.getHost();
    app.port = request.getRpcPort();
    app.url = request.getTrackingUrl();
    app.state = YarnApplicationState.RUNNING;
    log("REGISTER " + app.id + " " + app.host + ":" + app.port);
    RegisterApplicationMasterResponse response = Records.newRecord(RegisterApplicationMasterResponse.class);
    response.setMaximumResourceCapability(Resource.newInstance(8192, 8));
    response.setApplicationACLs(new HashMap<>());
    response.setQueue(app.context.getQueue());
    response.setContainersFromPreviousAttempts(new ArrayList<>());
    response.setNMTokensFromPreviousAttempts(new ArrayList<>());
    response.setSchedulerResourceTypes(EnumSet.of(SchedulerResourceTypes.MEMORY, SchedulerResourceTypes.CPU));
    return response;
  }

  static AllocateResponse allocate(App app, AllocateRequest request) {
    app.progress = request.getProgress();
    for (ResourceRequest wish : request.getAskList()) {
      if (!ResourceRequest.ANY.equals(wish.getResourceName())) continue;
      Ask ask = new Ask();
      ask.request = wish;
      ask.missing = wish.getNumContainers();
      app.asks.put(wish.getPriority() + "/" + wish.getAllocationRequestId() + "/" + wish.getCapability() + "/"
          + wish.getNodeLabelExpression(), ask);
    }
    List<Container> given = new ArrayList<>();
    List<NMToken> tokens = new ArrayList<>();
    for (Ask ask : app.asks.values()) {
      Resource resource = ask.request.getCapability();
      String label = ask.request.getNodeLabelExpression();
      for (Node node; ask.missing > 0 && (node = pick(resource, label)) != null; ask.missing--) {
        Container container = grant(app, node, ask.request);
        app.running.put(container.getId(), container);
        given.add(container);
        NMTokenIdentifier token = new NMTokenIdentifier(app.attempt(), node.id, app.user, 1);
        tokens.add(NMToken.newInstance(node.id, token(token.getBytes(), NMTokenIdentifier.KIND.toString(), node)));
      }
    }
    for (ContainerId id : request.getReleaseList()) {
      kill(id);
      if (!containers.containsKey(id) && app.running.remove(id) != null) {
        int code = ContainerExitStatus.ABORTED;
        synchronized (app.done) {
          app.done.add(ContainerStatus.newInstance(id, ContainerState.COMPLETE, "released", code));
        }
      }
    }
    AllocateResponse response = Records.newRecord(AllocateResponse.class);
    synchronized (app.done) {
      response.setCompletedContainersStatuses(new ArrayList<>(app.done));
      app.done.clear();
    }
    response.setResponseId(request.getResponseId() + 1);
    response.setAllocatedContainers(given);
    response.setNMTokens(tokens);
    response.setUpdatedNodes(new ArrayList<>());
    response.setAvailableResources(Resource.newInstance(8192, 8));
    response.setNumClusterNodes(nodes.size());
    response.setUpdatedContainers(new ArrayList<>());
    response.setApplicationPriority(Priority.newInstance(0));
    return response;
  }

  static Container grant(App app, Node node, ResourceRequest request) {
    ContainerId id = ContainerId.newContainerId(app.attempt(), ++app.lastContainer);
    Resource resource = request.getCapability();
    ContainerTokenIdentifier about = new ContainerTokenIdentifier(id, node.id.toString(), app.user, resource,
        Long.MAX_VALUE, 1, START, request.getPriority(), System.currentTimeMillis());
    Token token = token(about.getBytes(), ContainerTokenIdentifier.KIND.toString(), node);
    Container container = Container.newInstance(id, node.id, node.http, resource, request.getPriority(), token);
    container.setAllocationRequestId(request.getAllocationRequestId());
    return container;
  }

  static Token token(byte[] about, String kind, Node node) {
    return Token.newInstance(about, kind, new byte[] {1}, node.id.toString());
  }

  static Node pick(Resource resource, String label) {
    String wanted = label == null ? "" : label;
    return nodes.stream().filter(n -> n.label.equals(wanted) && n.fits(resource)).findFirst().orElse(null);
  }

  static Map<String, Method> masterMethods() {
    Map<String, Method> methods = new HashMap<>();
    methods.put("registerApplicationMaster",
        args -> register(caller(true), (RegisterApplicationMasterRequest) args[0]));
    methods.put("allocate", args -> allocate(caller(false), (AllocateRequest) args[0]));
    methods.put("finishApplicationMaster", args -> {
      App app = caller(false);
      FinishApplicationMasterRequest request = (FinishApplicationMasterRequest) args[0];
      app.diagnostics = String.valueOf(request.getDiagnostics());
      app.end(YarnApplicationState.FINISHED, request.getFinalApplicationStatus());
      return FinishApplicationMasterResponse.newInstance(true);
    });
    return methods;
  }

  // -- clients

  static App newApp() throws IOException {
    App app = new App();
    app.user = UserGroupInformation.getCurrentUser().getShortUserName();
    synchronized (apps) {
      app.id = ApplicationId.newInstance(START, ++lastApp);
    }
    apps.put(app.id, app);
    return app;
  }

  static App find(ApplicationId id) throws ApplicationNotFoundException {
    App app = apps.get(id);
    if (app == null) throw new ApplicationNotFoundException("no application " + id);
    return app;
  }

  static void submit(ApplicationSubmissionContext context) throws Exception {
    App app = find(context.getApplicationId());
    app.context = context;
    app.state = YarnApplicationState.ACCEPTED;
    log("SUBMIT " + app.id + " name=" + context.getApplicationName() + " queue=" + context.getQueue());
    Node node = pick(context.getResource(), context.getNodeLabelExpression());
    if (node == null) {
      app.diagnostics = "no node for the application master";
      app.end(YarnApplicationState.FAILED, FinalApplicationStatus.FAILED);
      return;
    }
    launch(app, node, app.master(), context.getAMContainerSpec(), context.getResource());
  }

  static ApplicationReport report(App app) {
    Resource used = Resource.newInstance(0, 0);
    for (Container container : app.running.values()) {
      used.setMemorySize(used.getMemorySize() + container.getResource().getMemorySize());
      used.setVirtualCores(used.getVirtualCores() + container.getResource().getVirtualCores());
    }
    ApplicationResourceUsageReport usage = Records.newRecord(ApplicationResourceUsageReport.class);
    usage.setNumUsedContainers(app.running.size() + 1);
    usage.setNumReservedContainers(0);
    usage.setUsedResources(used);
    usage.setReservedResources(Resource.newInstance(0, 0));
    usage.setNeededResources(Resource.newInstance(0, 0));
    usage.setMemorySeconds(0);
    usage.setVcoreSeconds(0);
    ApplicationReport report = Records.newRecord(ApplicationReport.class);
    report.setApplicationId(app.id);
    report.setCurrentApplicationAttemptId(app.attempt());
    report.setUser(app.user);
    report.setQueue(app.context == null ? "default" : app.context.getQueue());
    report.setName(app.context == null ? "" : app.context.getApplicationName());
    report.setApplicationType(app.context == null ? "" : app.context.getApplicationType());
    report.setApplicationTags(app.context == null ? Set.of() : app.context.getApplicationTags());
    report.setHost(app.host);
    report.setRpcPort(app.port);
    report.setYarnApplicationState(app.state);
    report.setDiagnostics(app.diagnostics);
    report.setTrackingUrl(app.url);
    report.setOriginalTrackingUrl(app.url);
    report.setStartTime(app.start);
    report.setFinishTime(app.end);
    report.setFinalApplicationStatus(app.status);
    report.setProgress(app.progress);
    report.setApplicationResourceUsageReport(usage);
    return report;
  }

  static NodeReport report(Node node) {
    Set<String> labels = node.label.isEmpty() ? new HashSet<>() : new HashSet<>(Set.of(node.label));
    return NodeReport.newInstance(node.id, NodeState.RUNNING, node.http, "/default-rack",
        Resource.newInstance(node.memory, node.vcores), Resource.newInstance(node.memoryLimit, node.vcoresLimit), 0, "",
        System.currentTimeMillis(), labels, null, null);
  }

  static QueueInfo queue() {
    QueueInfo queue = Records.newRecord(QueueInfo.class);
    queue.setQueueName("default");
    queue.setCapacity(1f);
    queue.setMaximumCapacity(1f);
    queue.setCurrentCapacity(0f);
    queue.setQueueState(QueueState.RUNNING);
    queue.setChildQueues(new ArrayList<>());
    queue.setApplications(new ArrayList<>());
    queue.setAccessibleNodeLabels(new HashSet<>());
    return queue;
  }

  static Map<String, Method> clientMethods() {
    Map<String, Method> methods = new HashMap<>();
    methods.put("getNewApplication", args ->
        GetNewApplicationResponse.newInstance(newApp().id, Resource.newInstance(1, 1), Resource.newInstance(8192, 8)));
    methods.put("submitApplication", args -> {
      submit(((SubmitApplicationRequest) args[0]).getApplicationSubmissionContext());
      return SubmitApplicationResponse.newInstance();
    });
    methods.put("getApplicationReport", args -> {
      App app = find(((GetApplicationReportRequest) args[0]).getApplicationId());
      return GetApplicationReportResponse.newInstance(report(app));
    });
    methods.put("getApplications", args ->
        GetApplicationsResponse.newInstance(new ArrayList<>(apps.values().stream().map(MiniYarn::report).toList())));
    methods.put("forceKillApplication", args -> {
      App app = find(((KillApplicationRequest) args[0]).getApplicationId());
      if (!app.over()) {
        app.end(YarnApplicationState.KILLED, FinalApplicationStatus.KILLED);
        kill(app.master());
        app.running.keySet().forEach(MiniYarn::kill);
      }
      return KillApplicationResponse.newInstance(true);
    });
    methods.put("getClusterMetrics", args ->
        GetClusterMetricsResponse.newInstance(YarnClusterMetrics.newInstance(nodes.size())));
    methods.put("getClusterNodes", args -> {
      GetClusterNodesResponse response = Records.newRecord(GetClusterNodesResponse.class);
      response.setNodeReports(new ArrayList<>(nodes.stream().map(MiniYarn::report).toList()));
      return response;
    });
    methods.put("getQueueInfo", args -> {
      GetQueueInfoResponse response = Records.newRecord(GetQueueInfoResponse.class);
      response.setQueueInfo(queue());
      return response;
    });
    methods.put("getQueueUserAcls", args -> {
      GetQueueUserAclsInfoResponse response = Records.newRecord(GetQueueUserAclsInfoResponse.class);
      response.setUserAclsInfoList(new ArrayList<>());
      return response;
    });
    return methods;
  }

  // -- start

  static void configure(String file, Map<String, String> values) throws IOException {
    StringBuilder text = new StringBuilder("<configuration>\n");
    values.forEach((name, value) -> text.append("<property><name>").append(name).append("</name><value>").append(value)
        .append("</value></property>\n"));
    Path path = new File(base, "conf/" + file).toPath();
    Files.createDirectories(path.getParent());
    Files.writeString(path, text + "</configuration>\n");
  }

  static void start(String[] labels, long memory, int vcores) throws Exception {
    // Not file:///, which skein does not take: a file system of its own, on a folder of this machine.
    Map<String, String> core = new LinkedHashMap<>();
    core.put("fs.defaultFS", "viewfs://mini/");
    core.put("fs.viewfs.mounttable.mini.linkMergeSlash", "file://" + base.getPath() + "/fs");
    core.put("hadoop.tmp.dir", base.getPath() + "/tmp");
    conf = new YarnConfiguration();
    core.forEach(conf::set);
    rpc = YarnRPC.create(conf);
    new File(base, "fs").mkdirs();
    for (String label : labels) {
      Node node = new Node();
      node.label = label;
      node.memoryLimit = memory;
      node.vcoresLimit = vcores;
      node.http = HOST + ":8042";
      node.id = NodeId.newInstance(HOST, serve(ContainerManagementProtocol.class, nodeMethods(node)).getPort());
      nodes.add(node);
      log("NODE " + node.id + " label='" + label + "'");
    }
    Map<String, String> yarn = new LinkedHashMap<>();
    yarn.put("yarn.resourcemanager.hostname", HOST);
    yarn.put("yarn.resourcemanager.address",
        HOST + ":" + serve(ApplicationClientProtocol.class, clientMethods()).getPort());
    yarn.put("yarn.resourcemanager.scheduler.address",
        HOST + ":" + serve(ApplicationMasterProtocol.class, masterMethods()).getPort());
    yarn.put("yarn.resourcemanager.webapp.address", HOST + ":8088");
    yarn.put("yarn.application.classpath", "$HADOOP_CONF_DIR," + jars.replace(':', ','));
    yarn.put("yarn.nodemanager.container-manager.thread-count", "4");
    yarn.put("yarn.client.nodemanager-connect.max-wait-ms", "5000");
    yarn.put("yarn.timeline-service.enabled", "false");
    configure("core-site.xml", core);
    configure("yarn-site.xml", yarn);
  }

  public static void main(String[] args) throws Exception {
    base = new File(args[0]).getAbsoluteFile();
    jars = args[1];
    long memory = args.length > 3 ? Long.parseLong(args[3]) : 8192;
    int vcores = args.length > 4 ? Integer.parseInt(args[4]) : 8;
    Runtime.getRuntime().addShutdownHook(
        new Thread(() -> containers.values().stream().filter(r -> !r.gone).forEach(r -> signal("KILL", r))));
    start(args[2].split(",", -1), memory, vcores);
    log("READY");
    System.in.transferTo(java.io.OutputStream.nullOutputStream());
    System.exit(0);
  }
}
